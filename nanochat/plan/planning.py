"""The plan of a run: every number that follows from the settings, the text and the machine.

`derive` is a pure function. `on_machine` decides what depends on the machine: whether the model is compiled,
how attention is computed, rows of a micro-batch. `resolved` is what a resumed run resolved at its first start
({}: a new run). It stays, so that the run goes on with the same bits.
"""

import math
from dataclasses import asdict, dataclass, replace

from nanochat import UserError
from nanochat.data.amount import LARGEST_VOCABULARY
from nanochat.data.public import PUBLIC, command
from nanochat.gpt import GPTConfig
from nanochat.machine import compiling
from nanochat.machine.hardware import Hardware
from nanochat.ops import kernels
from nanochat.ops.attention import Attention
from nanochat.ops.attention import choose as choose_attention
from nanochat.ops.attention import use as use_attention
from nanochat.ops.fp8 import check_fp8, convert_to_fp8
from nanochat.ops.kernels import Kernels
from nanochat.plan import counts, memory, scaling, trial
from nanochat.terminal import duration

# Up to 4 times a text is about as good as new text; after some 16 it teaches little more (arXiv 2305.16264)
FEW_EPOCHS, MANY_EPOCHS = 4, 20
LONG_S = 3 * 86_400  # seconds of training from which on the plan warns


@dataclass(frozen=True)
class Plan:
    """What a run does. `derive` and `on_machine` make it, wording.py explains it."""

    config: GPTConfig
    hardware: Hardware
    parameters: dict[str, int]  # by role, see counts.parameter_counts
    flops_per_token: int
    horizon: scaling.Horizon
    device_batch_size: int  # rows of a micro-batch
    grad_accum_steps: int  # micro-steps of a step
    scaled: scaling.ScaledRates
    warmup_steps: int
    data_tokens: int  # about how many tokens the training text has
    horizon_is_given: bool  # in steps; then no number of epochs is too many
    data_bytes: int = 0  # of the training text (0: unknown)
    rows_are_given: bool = False  # device_batch_size comes from the user, or from the checkpoint of this run
    compiled: bool = False  # whether the model is compiled
    compile_reason: str = ""
    eager_steps: int = 0  # first steps of a compiled run that stay eager, so that the first losses come soon
    attention: Attention | None = None  # its backends (None: not yet decided)
    kernels: Kernels | None = None  # those written by hand that are used (None: not yet decided)
    aspect_ratio: int = 0  # width / depth (0: a base model gives both)
    width_reason: str = ""  # where the width is from, if not from 64 x depth or the user
    fp8: bool = False  # the large products of the blocks train in 8 bits
    table_share: float = 0.0  # weight decay of embeddings and head, as a share of that of matrices
    more_text: str = ""  # how to get the public shards that the horizon needs, if some are missing

    @property
    def num_iterations(self) -> int:
        """Optimizer steps."""
        return self.horizon.num_iterations

    @property
    def total_batch_size(self) -> int:
        """Tokens of a step, over all micro-steps and processes."""
        return self.horizon.total_batch_size

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates by name of the setting, scaled."""
        return self.scaled.rates

    @property
    def weight_decay(self) -> float:
        """Weight decay of matrices, scaled."""
        return self.scaled.weight_decay

    @property
    def table_decay(self) -> float:
        """Weight decay of embeddings and head."""
        return self.table_share * self.weight_decay

    @property
    def tokens(self) -> int:
        return self.horizon.tokens

    @property
    def epochs(self) -> float:
        """How many times the run reads its training text."""
        return self.tokens / self.data_tokens

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of a token of the training text; 0 if they are not known."""
        return self.data_bytes / self.data_tokens

    @property
    def expected_memory(self) -> dict[str, int]:
        """Bytes that a process will take, by kind."""
        hardware, tokens = self.hardware, self.device_batch_size * self.config.max_seq_len
        processes = {"world_size": hardware.world_size, "on_cpu": hardware.device_type == "cpu"}
        processes["mlp_kernel"] = bool(self.kernels and "mlp" in self.kernels.names)
        return memory.training_bytes(self.config, tokens, hardware.dtype, self.compiled, **processes)

    @property
    def expected_bytes(self) -> int:
        """Bytes that a process will take."""
        return sum(self.expected_memory.values())

    @property
    def expected_seconds(self) -> float:
        """Seconds of all steps, at an assumed share of the peak."""
        if self.horizon.minutes:
            return 60 * self.horizon.minutes
        return self.tokens * self.flops_per_token / (scaling.ASSUMED_MFU * self.hardware.peak_flops)

    def numbers(self) -> dict[str, int]:
        """The plan's numbers for config.json, from which the report is made."""
        return {
            "num_iterations": self.num_iterations,
            "minutes": self.horizon.minutes,  # 0: num_iterations decides; else num_iterations is a guess
            "device_batch_size": self.device_batch_size,
            "parameters": self.parameters["total"],
            "flops_per_token": self.flops_per_token,
            "data_tokens": self.data_tokens,
            "bytes_per_token": self.bytes_per_token,
            "memory": self.hardware.held + self.expected_bytes,
            "seconds": self.expected_seconds,
        }

    @property
    def resolved(self) -> dict:
        """What checkpoints keep of the plan, for a resumed run and for mid_train."""
        kept = {"device_batch_size": self.device_batch_size, "rates": self.rates, "fp8": self.fp8}
        tables = "spelled", "value_tables", "bigrams", "copying"
        kept |= {name: getattr(self.config, name) for name in tables}
        kept |= {"table_share": self.table_share, "compiled": self.compiled}
        kept |= {"eager_steps": self.eager_steps, "peak": self.hardware.peak}
        if self.attention:
            kept["attention"] = self.attention.resolved
        if self.kernels:
            kept["kernels"] = self.kernels.names
        if self.aspect_ratio:
            kept["aspect_ratio"] = self.aspect_ratio
        if self.horizon.minutes:
            kept["target_minutes"] = self.horizon.minutes
        return kept

    def with_rows(self, rows: int) -> "Plan":
        """The same steps in micro-batches of `rows` rows, which divide those of a process."""
        micro_steps = self.device_batch_size * self.grad_accum_steps // rows
        return replace(self, device_batch_size=rows, grad_accum_steps=micro_steps)

    def most_rows(self, limit: int, free: float = math.inf) -> int:
        """The largest number of rows of a micro-batch, up to a limit, that divides the rows of a process and
        needs at most `free` bytes; 0 if there is none."""
        rows = self.device_batch_size * self.grad_accum_steps
        divisors = (n for n in range(min(rows, limit), 0, -1) if rows % n == 0)
        return next((n for n in divisors if self.with_rows(n).expected_bytes <= free), 0)

    def with_largest_micro_batch(self) -> "Plan":
        """The plan with as many rows a micro-batch as the estimate allows, unless the number is given."""
        if self.rows_are_given:
            return self
        on_cuda = self.hardware.device_type == "cuda"
        # On a GPU a trial corrects a choice that is too large (trial.py)
        allowed = (0.9 if on_cuda else 0.8) * self.hardware.memory
        most_tokens = 2**16 if on_cuda else 2**12  # larger micro-batches are not faster
        return self.with_rows(self.most_rows(most_tokens // self.config.max_seq_len, allowed) or 1)

    def factors_for(self, steps: float) -> tuple[float, float]:
        """Factors of learning rates and weight decay if the run makes `steps` steps in all. A run in minutes
        finds out on its way how many it makes; with a given number of steps the factors are 1, 1."""
        if not self.horizon.minutes:
            return 1.0, 1.0
        batch, d12_tokens, found = self.total_batch_size, self.horizon.d12_tokens, []
        for tokens in (steps * batch, self.tokens):
            rate = scaling.rate_scale(batch, tokens, d12_tokens)
            found.append((rate, scaling.scaled_weight_decay(1.0, rate, batch, tokens, d12_tokens)))
        (rate, decay), (planned_rate, planned_decay) = found
        return rate / planned_rate, decay / planned_decay

    def eager_left(self, step: int) -> int | None:
        """Steps after `step` that run eager before the code is compiled; None: it is never compiled."""
        return max(0, self.eager_steps - step) if self.compiled else None

    def apply_to(self, model):
        """Let a model compute as planned: its attention, kernels, and which products are in fp8."""
        if self.fp8:
            convert_to_fp8(model)
        use_attention(model, self.attention)
        kernels.use(self.kernels.names if self.kernels else ())

    def check(self, accept: str):
        """Raise UserError if this run must not begin. `accept` is the setting of that name."""
        if refusal := self.refusal(accept):
            raise UserError(refusal)

    def refusal(self, accept: str) -> str:
        """One sentence that says why this run must not begin; empty if it may."""
        # The estimate may be wrong, and a GPU says when memory runs out: a given number of rows may be tried.
        # On a CPU the system would end the process without a word
        accepted = {name.strip() for name in accept.split(",")}
        tried = (self.rows_are_given and self.hardware.device_type != "cpu") or "memory" in accepted
        if not tried and (sentence := memory.refusal(self)):
            return f"{sentence}; or go on all the same with --accept=memory"
        wanted = self.horizon_is_given or self.horizon.minutes  # an estimate is no reason to refuse
        if self.epochs > MANY_EPOCHS and not wanted and "epochs" not in accepted:
            more = self.more_text or (
                f"get more text with {command('climbmix', self.public_shards)} and give --data=climbmix"
            )
            return (
                f"this run would read its text {self.epochs:,.0f} times ({self.tokens:,} tokens from about "
                f"{self.data_tokens:,}) and learn little from most of them; {more}, or go on all the same "
                "with --accept=epochs"
            )
        return ""

    @property
    def public_shards(self) -> int:
        """How many shards of climbmix hold the tokens of this run with the vocabulary that such text gets."""
        larger = replace(self.config, vocab_size=max(self.config.vocab_size, LARGEST_VOCABULARY))
        growth = counts.scaling_parameters(larger) / counts.scaling_parameters(self.config)
        return PUBLIC["climbmix"].shards_for(round(self.tokens * growth))

    def warnings(self, accept: str) -> list[str]:
        """What a person should know before the run begins, a line each."""
        said = [f"this run is refused: {refusal}"] if (refusal := self.refusal(accept)) else []
        if not said and (sentence := memory.refusal(self)):
            said.append(sentence)
        if self.more_text:
            said.append(f"the text is read {self.epochs:.2f} times; {self.more_text}")
        elif self.epochs > FEW_EPOCHS:
            said.append(f"the text is read {self.epochs:.1f} times; above {FEW_EPOCHS} more text is better")
        if self.expected_seconds > LONG_S:
            smaller = "" if self.hardware.device_type == "cuda" else ", such as runs/laptop.py,"
            said.append(
                f"this run takes about {duration(self.expected_seconds)} on this machine; stop it and give a "
                f"smaller one{smaller} or use more GPUs"
            )
        return said

    def identity(self, dataset, tokenizer, seed: int) -> dict:
        """What must be equal in a run and in the checkpoint that it continues."""
        return {
            "model": asdict(self.config),
            "data": dataset.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "seed": seed,
            "total_batch_size": self.total_batch_size,
        }


def derive(settings: dict, tokenizer, dataset, hardware: Hardware, resolved: dict, weights=None) -> Plan:
    """The plan for the settings of base_train, {name: value}, on a data set and with its tokenizer; pure.

    weights: the Checkpoint that a new run starts from, if any; its model says which rows tokens have. Raises
    UserError for settings that contradict each other.
    """
    V = tokenizer.vocab_size
    config, horizon = scaling.horizon_of(settings, V, hardware.peak_flops, resolved)
    data_tokens = dataset.estimated_tokens(tokenizer)
    before = weights.model if weights else resolved
    config = replace(config, **scaling.tables_for(settings, config, horizon, data_tokens, before))
    plan = _plan(
        settings,
        config,
        hardware,
        horizon,
        scaling.scaled_rates(settings, config.width, horizon),
        resolved,
        data_tokens=data_tokens,
        data_bytes=dataset.text_bytes,
        horizon_is_given=settings["num_iterations"] > 0,
        more_text=dataset.more_text,
    )
    aspect_ratio, reason = config.width // config.depth, ""
    if settings["aspect_ratio"] == -1 and "aspect_ratio" in resolved:
        reason = "; aspect ratio as at the run's first start"
    elif settings["aspect_ratio"] == -1 and aspect_ratio < scaling.WIDEST:
        reason = f"; {scaling.WIDEST} x depth is too wide for so few FLOPs"
    share = scaling.table_share(settings, plan.epochs, resolved)
    return replace(plan, table_share=share, aspect_ratio=aspect_ratio, width_reason=reason)


def derive_continued(
    settings: dict, config: GPTConfig, base: dict, epoch_tokens: int, hardware: Hardware, resolved: dict
) -> Plan:
    """The plan for the settings of mid_train, {name: value}, which continues a base model.

    config: the base model's. base: the state of its checkpoint. epoch_tokens: rows of an epoch times
    max_seq_len, padding included. Raises UserError for settings that contradict each other, and for a base
    model without its rates.
    """
    batch, batch_reason = settings["total_batch_size"], "as asked for"
    if batch == -1:
        batch, batch_reason = base["identity"].get("total_batch_size"), "as the base run's"
        if type(batch) is not int or not 0 < batch < 2**32:
            raise UserError("the base model's checkpoint does not say its batch; give --total_batch_size")
    steps, reason = settings["num_iterations"], "num_iterations is given"
    if steps <= 0:
        steps = max(1, round(settings["num_epochs"] * epoch_tokens / batch))
        reason = f"{settings['num_epochs']:g} epochs of {epoch_tokens:,} tokens"
    rates = base.get("resolved", {}).get("rates")
    if rates is None:
        raise UserError(
            "the base model's checkpoint does not say its learning rates; save it once more with this "
            "version: resume its run with a larger --num_iterations"
        )
    fraction = settings["rate_fraction"]
    rates, rate_reason = {n: fraction * rate for n, rate in rates.items()}, f"{fraction:g} x the base run's"
    scaled = scaling.ScaledRates(rates, settings["weight_decay"], rate_reason, "constant")
    horizon = scaling.Horizon(steps, batch, 0.0, reason, batch_reason)
    return _plan(
        settings, config, hardware, horizon, scaled, resolved, data_tokens=epoch_tokens, horizon_is_given=True
    )


def _plan(settings, config, hardware, horizon, scaled, resolved, **more) -> Plan:
    """The plan for a horizon and rates, with the largest micro-batch. A resumed run keeps its rows if they
    still divide the batch. more: the fields of a Plan that derive and derive_continued give it."""
    model = counts.on_meta(config)
    batch, device_batch_size = horizon.total_batch_size, settings["device_batch_size"]
    rows = scaling.rows_per_process(batch, config.max_seq_len, device_batch_size, hardware.world_size)
    if device_batch_size == -1:
        device_batch_size = resolved.get("device_batch_size", -1)
    given = device_batch_size != -1 and rows % device_batch_size == 0
    device_batch_size = device_batch_size if given else 1
    plan = Plan(
        config=config,
        hardware=hardware.with_peak_of(resolved),
        parameters=counts.parameter_counts(model),
        flops_per_token=counts.flops_per_token(model),
        horizon=horizon,
        device_batch_size=device_batch_size,
        grad_accum_steps=rows // device_batch_size,
        scaled=scaled,
        warmup_steps=scaling.warmup_steps(settings, horizon),
        rows_are_given=given,
        fp8=settings.get("fp8", False),
        **more,
    )
    return plan.with_largest_micro_batch()


def decide(settings: dict, tokenizer, dataset, hardware: Hardware, machine, resolved: dict, weights) -> Plan:
    """The plan of a run of base_train on this machine: `derive` and `on_machine` in one."""
    check_fp8(settings["fp8"], machine.device, hardware.dtype, settings["max_seq_len"], resolved)
    plan = derive(settings, tokenizer, dataset, hardware, resolved, weights)
    return on_machine(plan, settings, machine, resolved, divided_rows=settings["document_mask"])


def on_machine(
    plan: Plan, settings: dict, machine, resolved: dict, divided_rows: bool, reduction: str = "mean"
) -> Plan:
    """The plan with what this machine decides, the same on all its processes.

    On a GPU a run that will begin tries its micro-batch, and takes fewer rows if memory runs out.
    divided_rows: a token sees its own document only. reduction: of the loss.
    """
    device, before = machine.device, resolved.get("compiled")
    decision = compiling.decide(settings["compile"], device, plan.expected_seconds, before)
    compiled, reason = min(machine.all_gather(decision))  # False is less than True: one "no" decides for all
    plan = replace(plan, compiled=compiled, compile_reason=reason).with_largest_micro_batch()
    backends = choose_attention(plan.config, machine, plan.hardware.dtype, compiled, divided_rows, resolved)
    plan = replace(plan, attention=backends, eager_steps=eager_steps(plan, settings["compile"], resolved))
    if settings.get("kernels") != "off":
        plan = replace(plan, kernels=kernels.choose(plan.config, machine, plan.hardware.dtype, resolved))
    tried = device.type != "cpu" and plan.device_batch_size != resolved.get("device_batch_size")
    if tried and not settings["plan"] and not plan.refusal(settings["accept"]):
        plan = trial.with_tried_micro_batch(plan, machine, divided_rows, reduction)
    return plan


def eager_steps(plan: Plan, setting: str, resolved: dict) -> int:
    """How many first steps of a compiled run stay eager. Their losses, or an error in them, come before
    the wait for the compiler.

    Only with `setting` (compile) auto, on a CPU with memory for eager steps too, and in one process, because
    DDP wraps a model once.
    """
    if not plan.compiled or plan.hardware.device_type != "cpu" or plan.hardware.world_size > 1:
        return 0
    if resolved:
        return resolved.get("eager_steps", 0)
    fits = replace(plan, compiled=False).expected_bytes <= 0.8 * plan.hardware.memory
    return compiling.EAGER_STEPS if setting == "auto" and fits else 0

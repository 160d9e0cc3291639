"""The rules of the dial: from depth to width, horizon, batch and learning rates. Pure functions.

The reference is a d12 model trained on 12 tokens a parameter with batches of 2**19 tokens. The learning rates
of the scripts are for it; the rules carry them to other sizes. planning.py puts the rules together.

resolved: what a resumed run resolved at its first start ({}: a new run). It stays.
"""

import bisect
import math
from dataclasses import dataclass, replace

from nanochat import UserError
from nanochat.gpt import GPTConfig
from nanochat.plan.counts import flops_per_token, on_meta, scaling_parameters

REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19  # tokens
REFERENCE_WIDTH = 768
REFERENCE_RATIO = 12.0  # tokens a parameter
HORIZON_EXPONENT = 0.32  # rates ~ tokens**-0.32: arXiv 2409.19913
MOST_DECAY = 8.0  # in short runs, rate x decay is at most 8 times the settings' (docs/ablations.md)
MOST_STEPS = 10**9  # steps of a run, the end of the range of base_train's num_iterations
SPELLED_TOKENS = 10_000  # with fewer tokens for each token of the vocabulary, it has sub-word embeddings
TABLE_TOKENS = 2_500  # with fewer, all value embeddings are rows of the head (docs/ablations.md)
# Rows that pairs of tokens share, and triples as many (docs/ablations.md): one for each 16 tokens that a run
# reads for the first time, at most 2^27 numbers, but at least 8 rows for each of the vocabulary
TOKENS_PER_ROW, FEWEST_BIGRAMS, MOST_NUMBERS = 16, 8, 2**27
WIDEST = 64  # aspect ratio, unless the run is too short for so wide a model
BEST_RATIO = 2.0  # tokens a parameter, if FLOPs are few: our fit at d4 and d6 (docs/ablations.md)
ASSUMED_MFU = 0.3  # share of the peak that training is assumed to reach, before anything is timed
BATCH_EXPONENT = 0.383  # past d12's horizon, best batch ~ tokens**0.383: Power Lines, arXiv 2505.13738
SHORT_BATCH_EXPONENT = 0.77  # below that horizon: our fit to the best batches at d4 (docs/ablations.md)


def model_config(
    depth: int, aspect_ratio: int, head_dim: int, max_seq_len: int, vocab_size: int, window_pattern: str,
    bigrams: int = -1,
) -> GPTConfig:  # fmt: skip
    """Width = depth * aspect_ratio, in whole heads. UserError for shapes that no model can have."""
    if head_dim % 2:
        raise UserError(
            f"head_dim is {head_dim}; rotary embeddings turn pairs of channels: give an even number, "
            f"such as {head_dim + 1}"
        )
    if not window_pattern or set(window_pattern) - set("LS"):
        raise UserError(
            f"window_pattern is {window_pattern!r}; give letters L (all of the past) and S (a quarter)"
        )
    num_heads = math.ceil(depth * aspect_ratio / head_dim)
    bigrams = FEWEST_BIGRAMS if bigrams == -1 else bigrams  # more in long runs: tables_for
    width = num_heads * head_dim
    return GPTConfig(
        depth, width, num_heads, vocab_size, max_seq_len, window_pattern, bigrams=bigrams, copying=True
    )


def aspect_ratio_for(settings: dict, vocab_size: int, flops: float, resolved: dict) -> int:
    """The aspect ratio of the settings; if it is -1, the one that suits a run of so many FLOPs.

    That is WIDEST. If the FLOPs are too few for it, the model reads BEST_RATIO tokens for each of its
    parameters, to the nearest whole head. flops: 0 if something else decides the length of the run.
    """
    if settings["aspect_ratio"] != -1:
        return settings["aspect_ratio"]
    if resolved or flops <= 0:
        return resolved.get("aspect_ratio", WIDEST)
    depth, head_dim, T = settings["depth"], settings["head_dim"], settings["max_seq_len"]

    def is_too_wide(width: int) -> bool:
        parameters = width * (12 * depth * width + vocab_size)  # matrices and head, without gates
        return flops < BEST_RATIO * parameters * (6 * parameters + 12 * depth * width * T)

    if not is_too_wide(WIDEST * depth):
        return WIDEST
    width = bisect.bisect(range(1, WIDEST * depth), False, key=is_too_wide)
    heads = max(1, round(width / head_dim))
    return min(WIDEST, max(1, heads * head_dim // depth))


@dataclass(frozen=True)
class Horizon:
    """The length of a run and the size of its steps, each with its reason."""

    num_iterations: int
    total_batch_size: int  # tokens a step
    d12_tokens: float  # horizon of the reference model
    reason: str
    batch_reason: str
    minutes: float = 0.0  # minutes of the run, whose num_iterations is then an estimate (0: steps are given)

    @property
    def tokens(self) -> int:
        return self.num_iterations * self.total_batch_size


def derive_horizon(
    config: GPTConfig,
    num_iterations: int,
    target_flops: float,
    target_param_data_ratio: float,
    total_batch_size: int,
) -> Horizon:
    """The number of steps, from the first of the three that is positive, and the batch if it is -1.

    Raises UserError if none of the three is positive.
    """
    T = config.max_seq_len
    sizes = REFERENCE_DEPTH, REFERENCE_WIDTH // REFERENCE_DEPTH, config.head_dim, T, config.vocab_size
    reference = model_config(*sizes, config.window_pattern)
    d12_tokens = REFERENCE_RATIO * scaling_parameters(reference)
    if num_iterations > 0:
        tokens, reason = tokens_of_steps(num_iterations, d12_tokens), "num_iterations is given"
    elif target_flops > 0:
        flops = flops_per_token(on_meta(config))
        tokens, reason = target_flops / flops, f"{target_flops:.3g} FLOPs / {flops:.3g} a token"
    elif target_param_data_ratio > 0:
        tokens = target_param_data_ratio * scaling_parameters(config)
        reason = f"{target_param_data_ratio:g} tokens for each of {scaling_parameters(config):,} parameters"
    else:
        raise UserError(
            "the run has no end: give --num_iterations, --target_flops, --target_minutes or "
            "--target_param_data_ratio a positive number"
        )
    batch_reason = "as asked for"
    if total_batch_size == -1:
        total_batch_size = best_batch(tokens, d12_tokens, T)
        exponent = batch_exponent(total_batch_size, REFERENCE_BATCH)
        batch_reason = f"B ~ D^{exponent} from d12's 2^19"
    if num_iterations <= 0:
        num_iterations = max(1, round(tokens / total_batch_size))
        reason += ", which is less than one step" if tokens < total_batch_size else ""
    return Horizon(num_iterations, total_batch_size, d12_tokens, reason, batch_reason)


def horizon_of(
    settings: dict, vocab_size: int, peak_flops: float, resolved: dict
) -> tuple[GPTConfig, Horizon]:
    """The model and the horizon for the settings of base_train, {name: value}, and a vocabulary.

    Minutes become FLOPs with peak_flops, of all processes, and FLOPs an estimate of the number of steps. It
    decides the batch, the rates and the warm-up; the clock decides when the run ends (run/clock.py).
    """
    ends = ("num_iterations", "target_flops", "target_param_data_ratio", "total_batch_size")
    steps, flops, ratio, batch = (settings[name] for name in ends)
    minutes = max(0.0, settings["target_minutes"]) if max(steps, flops) <= 0 else 0.0
    if minutes:
        flops = max(1.0, 60 * minutes * ASSUMED_MFU * peak_flops)
    aspect_ratio = aspect_ratio_for(settings, vocab_size, 0 if steps > 0 else flops, resolved)
    sizes = settings["depth"], aspect_ratio, settings["head_dim"], settings["max_seq_len"]
    config = model_config(*sizes, vocab_size, settings["window_pattern"], settings["bigrams"])
    horizon = derive_horizon(config, steps, flops, ratio, batch)
    if horizon.num_iterations > MOST_STEPS and not minutes:
        raise UserError(
            f"{horizon.reason} are {horizon.num_iterations:.3g} steps, and a run has at most "
            f"{MOST_STEPS:,}; give fewer, or a larger --total_batch_size"
        )
    if minutes:
        steps = min(MOST_STEPS, horizon.num_iterations)
        if resolved:
            steps = resolved["num_iterations"] * minutes / resolved.get("target_minutes", minutes)
            steps = min(MOST_STEPS, max(1, round(steps)))
        if resolved and batch == -1:
            batch, reason = resolved["total_batch_size"], "as at the run's first start"
            horizon = replace(horizon, total_batch_size=batch, batch_reason=reason)
        reason = f"{minutes:g} minutes from the command to its end; the number of steps is an estimate"
        horizon = replace(horizon, num_iterations=steps, reason=reason, minutes=minutes)
    return config, horizon


def tables_for(settings: dict, config: GPTConfig, horizon: Horizon, data_tokens: int, before: dict) -> dict:
    """Which rows tokens have beside embedding and head: GPTConfig's spelled, value_tables, bigrams, copying.

    Sub-word embeddings (subword.py) help where a run is too short for each token's row to learn alone, tables
    of value embeddings where it is not (docs/ablations.md). config: its width and vocabulary count.
    data_tokens: of the training text. before: holds those of the run that goes on, or of the weights that a
    new run starts from; {} without either.
    """
    tokens = horizon.tokens / config.vocab_size
    rows = min(MOST_NUMBERS // config.width, min(horizon.tokens, data_tokens) // TOKENS_PER_ROW)
    bigrams = before.get("bigrams", max(FEWEST_BIGRAMS, rows // config.vocab_size))
    found = {"spelled": tokens < SPELLED_TOKENS, "value_tables": 0, "copying": not before}
    found["bigrams"] = bigrams if settings["bigrams"] == -1 else settings["bigrams"]
    if tokens >= TABLE_TOKENS:
        found["value_tables"] = 2 if found["bigrams"] > FEWEST_BIGRAMS else 1
    found |= {name: before[name] for name in ("spelled", "value_tables", "copying") if name in before}
    for name, setting in (("spelled", settings["spelling"]), ("copying", settings["copying"])):
        if setting != "auto":
            found[name] = setting == "on"
    return found


def table_share(settings: dict, epochs: float, resolved: dict) -> float:
    """The factor of the weight decay of embeddings and head (optim.py): 0 up to one epoch, 1 from two on,
    when a text would be learned by heart (docs/ablations.md)."""
    if settings["table_decay"] != -1:
        return settings["table_decay"]
    return resolved.get("table_share", min(1.0, max(0.0, epochs - 1)))


def horizon_tokens(settings: dict, hardware, vocab_size: int = -1) -> int:
    """How many tokens a run with the settings of base_train reads; an estimate if the horizon is in minutes.

    hardware: a hardware.Hardware. vocab_size: the tokenizer's (-1: not known yet; then the setting's, or that
    of public text).
    """
    given = [size for size in (vocab_size, settings["vocab_size"], 32768) if size != -1]
    _, horizon = horizon_of(settings, given[0], hardware.peak_flops, {})
    return horizon.tokens


def batch_exponent(size: float, reference: float) -> float:
    """The best batch grows with this power of the tokens. size: a horizon or batch, reference: d12's."""
    return SHORT_BATCH_EXPONENT if size < reference else BATCH_EXPONENT


def unrounded_batch(tokens: float, d12_tokens: float) -> float:
    """The best tokens a step for a horizon of `tokens`, before `best_batch` rounds to whole rows."""
    return REFERENCE_BATCH * (tokens / d12_tokens) ** batch_exponent(tokens, d12_tokens)


def best_batch(tokens: float, d12_tokens: float, max_seq_len: int) -> int:
    """Tokens a step for a horizon of `tokens`: a power of two rows."""
    best = unrounded_batch(tokens, d12_tokens)
    return max_seq_len * 2 ** max(0, round(math.log2(best / max_seq_len)))


def tokens_of_steps(steps: int, d12_tokens: float) -> float:
    """The horizon of a number of steps with its best batch: B = 2**19 * (steps * B / d12_tokens)**exponent,
    solved for B, times the steps."""
    exponent = batch_exponent(steps * REFERENCE_BATCH, d12_tokens)
    scale = REFERENCE_BATCH * (steps / d12_tokens) ** exponent
    return steps * scale ** (1 / (1 - exponent))


def rows_per_process(total_batch_size: int, max_seq_len: int, device_batch_size: int, world_size: int) -> int:
    """Rows of the batch that each process works on. UserError if the numbers do not divide."""
    rows, rest = divmod(total_batch_size, max_seq_len * world_size)
    unit = max_seq_len * world_size * max(1, device_batch_size)
    if total_batch_size % unit:
        shape = f"{'device_batch_size x ' if device_batch_size > 0 else ''}max_seq_len x processes"
        below = total_batch_size // unit * unit
        valid = " or ".join(str(n) for n in (below, below + unit) if n)
        said = f"total_batch_size {total_batch_size} is not a multiple of {shape} = {unit}; use {valid}"
        if not rest:  # another device_batch_size divides it
            fewer = next(n for n in range(min(device_batch_size, rows), 0, -1) if rows % n == 0)
            said += f"; or use --device_batch_size={fewer}"
        raise UserError(said)
    return rows


def rate_scale(total_batch_size: int, tokens: float, d12_tokens: float) -> float:
    """The factor of all learning rates, at most 2.

    Rates grow with the square root of the batch, since a larger batch has less noise (arXiv 2205.10287), and
    with tokens**-0.32, since a shorter run needs larger steps (arXiv 2409.19913). Measured at d4:
    docs/ablations.md.
    """
    scale = math.sqrt(total_batch_size / REFERENCE_BATCH) * (tokens / d12_tokens) ** -HORIZON_EXPONENT
    return min(2.0, scale)


def scaled_weight_decay(
    weight_decay: float, scale: float, total_batch_size: int, tokens: float, d12_tokens: float
) -> float:
    """Weight decay for rates multiplied by `scale`.

    It keeps rate * decay * steps, how often a run renews its weights, as at d12 (arXiv 2405.13698). In short
    runs rate * decay is at most MOST_DECAY times that of the settings.
    """
    d12_steps, steps = d12_tokens / REFERENCE_BATCH, tokens / total_batch_size
    return weight_decay * min(MOST_DECAY, d12_steps / steps) / scale


@dataclass(frozen=True)
class ScaledRates:
    """Learning rates and weight decay for a model and a horizon, each with its reason."""

    rates: dict[str, float]  # by name of the setting
    weight_decay: float
    reason: str
    decay_reason: str


def scaled_rates(settings: dict, width: int, horizon: Horizon) -> ScaledRates:
    """The rates of the settings, {name: value}, carried over from d12 to a model of that width."""
    run = horizon.total_batch_size, horizon.tokens, horizon.d12_tokens
    scale = rate_scale(*run)
    # A step changes a logit by a sum over the width (muP, arXiv 2203.03466). Embeddings, scalars and Muon
    # need no such factor (docs/scale.md)
    head_scale = REFERENCE_WIDTH / width
    rates = {
        "embedding_lr": settings["embedding_lr"] * scale,
        "unembedding_lr": settings["unembedding_lr"] * scale * head_scale,
        "scalar_lr": settings["scalar_lr"] * scale,
        "matrix_lr": settings["matrix_lr"] * scale,
    }
    reason = f"x {scale:.3f} (batch^1/2 x tokens^-{HORIZON_EXPONENT}, against d12), the head's "
    reason += f"also x {head_scale:.3f} (1 / width)"
    decay = scaled_weight_decay(settings["weight_decay"], scale, *run)
    return ScaledRates(rates, decay, reason, "rate x decay x steps as at d12; linear to 0")


def warmup_steps(settings: dict, horizon: Horizon) -> int:
    """Steps of linear warm-up: those of the settings, at most a tenth of the run."""
    return min(settings["warmup_steps"], horizon.num_iterations // 10)

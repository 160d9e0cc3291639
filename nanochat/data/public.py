"""Public data sets on the Hugging Face Hub. A run reads the first shards of one.

Their number follows from the run's horizon at its first start, and is saved in its checkpoints. The first
epoch reads them in the order of their numbers, so training can begin when the first shard is there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from nanochat import UserError
from nanochat.data.amount import LARGEST_VOCABULARY
from nanochat.data.dataset import Dataset
from nanochat.data.download import BackgroundDownload
from nanochat.data.streaming_shards import Arrival, ArrivingShards
from nanochat.data.tokenizer import Tokenizer

# Tokens in one public shard. Its author takes 240 shards for 11.2 billion tokens of fineweb-edu, 11 % more
# than computed from 250 million characters a shard and 4.8 characters a token (karpathy/nanochat:
# speedrun.sh of 2025-10-13), and 150 shards for 7 billion tokens of climbmix (dev/LOG.md, 2026-03-04): the
# same number twice.
TOKENS_PER_SHARD = 46_700_000


@dataclass(frozen=True)
class Public:
    """A data set on the Hub: shard_00000.parquet and so on. The last shard is the validation split."""

    repo: str
    shards: int  # the validation shard included

    def file(self, number: int) -> str:
        return f"shard_{number:05d}.parquet"

    @property
    def validation(self) -> str:
        return self.file(self.shards - 1)

    def shards_for(self, tokens: int) -> int:
        """About how many training shards hold `tokens` tokens: at least 1, at most all.

        With a vocabulary of 32,768 tokens; with a smaller one, a shard has more tokens.
        """
        return min(max(1, -(-tokens // TOKENS_PER_SHARD)), self.shards - 1)


PUBLIC = {
    "climbmix": Public("karpathy/climbmix-400b-shuffle", 6543),
    "fineweb-edu": Public("karpathy/fineweb-edu-100b-shuffle", 1823),
}


@dataclass(frozen=True)
class PublicDataset(Dataset):
    """A public data set. `for_run` chooses how many of its training shards a run reads."""

    public: Public
    arrival: Arrival = field(compare=False)
    here: int  # training shards that are complete, counted up to the first one that is missing
    download: bool  # whether missing shards are downloaded while training goes on
    tokens: Callable[..., int] | None = field(compare=False)  # tokens(vocab_size) is how many the run reads
    suggested_vocab_size = LARGEST_VOCABULARY  # however few shards are here

    @property
    def sampled_shards(self) -> list[Path]:
        """The first shard: the tokenizer is the same for any number of shards."""
        return self.train_shards[:1]

    def for_run(self, tokenizer: Tokenizer, resumed, machine) -> "PublicDataset":
        """The data set with as many shards as the horizon needs; with download=off, at most those that are
        here. A resumed run keeps the number of its first start. Every process calls this.

        Raises UserError if download=off and shards of a resumed run are missing.
        """
        here = min(machine.all_gather(self.here))
        needed = self.public.shards_for(self.tokens(tokenizer.vocab_size))
        before = resumed.state["loader"].get("shards") if resumed else None
        count = before or (needed if self.download else min(needed, here))
        if count > here and not self.download:
            raise UserError(
                f"this run reads {count} training shards of {self.name}, and {here} of them are in "
                f"{self.arrival.folder}; get the others: {command(self.name, count)}, or give --download=on"
            )
        self.arrival.how = command(self.name, count)
        paths = [self.arrival.folder / self.public.file(number) for number in range(count)]
        coming = f", {count - here:,} of them come while training goes on" if count > here else ""
        note, more_text = f"{count:,} of {self.public.shards - 1:,} training shards{coming}", ""
        if count < needed and before:
            more_text = (
                f"the run keeps the {count} shards of its first start, and a new one (--resume=never) would "
                f"take {needed}"
            )
        elif count < needed:
            more_text = (
                f"the horizon needs {needed} shards of {self.name} and {count} are here, so get the others "
                f"with {command(self.name, needed)}, or give --download=on"
            )
        shards = ArrivingShards(paths, self.arrival)
        return replace(self, train_shards=shards, note=note, here=here, more_text=more_text)

    def begin(self, machine, stop, timeout_s: float) -> None:
        # Other processes wait timeout_s at most, perhaps for the one that waits for a shard
        longest_s = timeout_s / 2 if machine.world_size > 1 else float("inf")
        self.arrival.belong_to(machine.is_main, stop, longest_s)
        if self.download and machine.local_rank == 0:
            missing = [path.name for path in self.train_shards[self.here :]]
            BackgroundDownload(self.public.repo, missing, self.arrival).start()

    def close(self, machine) -> None:
        self.arrival.closed.set()
        if reasons := [said for said in machine.all_gather(self.arrival.given_up) if said]:
            raise UserError(reasons[0])


@dataclass(frozen=True)
class UnseenDataset(Dataset):
    """Public data that are not here, for a plan: no text, and about how much there is."""

    public: Public
    tokens: Callable[..., int] = field(compare=False)

    train_texts, text_bytes = None, 0
    suggested_vocab_size = LARGEST_VOCABULARY

    def estimated_tokens(self, tokenizer) -> int:
        return self.public.shards_for(self.tokens(tokenizer.vocab_size)) * TOKENS_PER_SHARD


def command(name: str, shards: int) -> str:
    """The command that downloads so many training shards of a public data set."""
    return f"python -m scripts.download --name={name} --num_shards={shards}"

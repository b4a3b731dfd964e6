"""A model for tests of a real server: SmolLM2 where it is in the cache already, else two layers of random Llama."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.engines.live import model
from tests.small_llama import save_small_llama

VOCABULARY = 512


@contextmanager
def alone() -> Iterator[None]:
    """Hold off other tests with a server: two on two cores would starve each other."""
    with (Path(tempfile.gettempdir()) / f"patchbench-live-{os.getuid()}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cached_smollm2() -> Path | None:
    """The converted model, if it is there and whole; nothing is fetched."""
    found = model.folder_in(model.cache_folder())
    return found if found.is_dir() and not model.fault(found) else None


def make_small_llama(folder: Path) -> Path:
    """A folder with config, weights and a tokenizer of made-up words; loads in no time."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    save_small_llama(folder, 2048, VOCABULARY)
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder

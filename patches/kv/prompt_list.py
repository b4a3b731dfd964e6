"""The operator's list of prompts to have in the cache: JSON Lines, checked before anything is built on it.

One prompt a line, the most important first, in one of three forms:

    {"prompt_token_ids": [1, 2, 3]}
    {"text": "You are ..."}                                   tokenised as the completions API does
    {"messages": [{"role": "system", "content": "..."}]}     through the model's chat template, nothing added behind

Each may have a `name` (for the log) and a `cache_salt`, without which no request that has one finds its blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_PROMPTS = 4_096


class ListedPrompt(BaseModel):
    """One line of the list."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt_token_ids: list[int] | None = Field(default=None, min_length=1)
    text: str | None = Field(default=None, min_length=1)
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    name: str = ""
    cache_salt: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_form(self) -> ListedPrompt:
        forms = (self.prompt_token_ids, self.text, self.messages)
        if sum(form is not None for form in forms) != 1:
            raise ValueError("give exactly one of prompt_token_ids, text and messages")
        if self.prompt_token_ids is not None and min(self.prompt_token_ids) < 0:
            raise ValueError("a token id is negative")
        return self


def read_prompt_list(path: Path) -> list[ListedPrompt]:
    """The prompts of a list, in order; blank lines are skipped.

    Raises:
        ValueError: one line that says which file and line, and what is wrong.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(f"{path}: {size} bytes are more than {MAX_FILE_BYTES}; list fewer prompts")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{path}: {reason}; name a JSON Lines file of prompts") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(ListedPrompt.model_validate(json.loads(line)))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            what = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{path}, line {number}: {where + ': ' if where else ''}{what}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f'{path}, line {number}: this is no JSON object; write {{"text": "..."}}'
            ) from error
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"{path}: more than {MAX_PROMPTS} prompts; list the most important ones")
    return prompts


def tokens_of(prompt: ListedPrompt, tokenizer: Any) -> list[int]:
    """The prompt's token ids; `tokenizer` is a function that gives the model's, called where one is needed."""
    if prompt.prompt_token_ids is not None:
        return prompt.prompt_token_ids
    if prompt.text is not None:
        return list(tokenizer().encode(prompt.text))
    ids = tokenizer().apply_chat_template(
        prompt.messages, tokenize=True, add_generation_prompt=False, return_dict=False
    )
    return list(ids)

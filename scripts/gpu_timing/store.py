"""The folder of a run: every time taken, at once and for good, and the tables made of complete blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.atomic import write_json, write_text
from harness.errors import RunFailed, UserError
from scripts.gpu_timing.rows import ATTENTION, DENSE, PER_SEQUENCE, Block, Row

ROWS, META = "rows.jsonl", "meta.json"
_COLUMNS = {
    ATTENTION: ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"),
    DENSE: ("layer", "tokens"),
    PER_SEQUENCE: ("layer", "sequences"),
}


class Store:
    """`rows.jsonl` (first line: the set-up; then a row each, as taken), the three tables and `meta.json`."""

    def __init__(self, folder: Path, setup: dict[str, Any]) -> None:
        """Open a folder, with what an earlier run left there.

        Raises:
            UserError: the folder holds times of another set-up, or cannot be used.
        """
        self.folder = folder
        self.rows: dict[Row, dict[str, Any]] = {}
        self._file = folder / ROWS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = self._file.read_text(encoding="utf-8") if self._file.exists() else ""
            # A run that was killed may have left half a line; its row is taken again.
            whole = text[: text.rfind("\n") + 1]
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines:
                self._same(lines[0]["setup"], setup)
            for line in lines[1:]:
                self.rows[Row(line["table"], line["layer"], tuple(line["sizes"]))] = line
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{self._file}: not a file of this script; name another folder") from None
        except OSError as error:
            raise UserError(f"{folder}: cannot be used ({error.strerror}); name another folder") from None
        if whole != text:
            write_text(self._file, whole)
        if not lines:
            self._append({"setup": setup})

    def add(self, row: Row, taken: dict[str, Any]) -> None:
        """Keep a time; it is in the file when this returns."""
        line = {"table": row.table, "layer": row.layer, "sizes": list(row.sizes), **taken}
        self.rows[row] = line
        self._append(line)

    def complete(self, block: Block) -> bool:
        """Whether every row of a block is there."""
        return all(row in self.rows for row in block.rows)

    def write(self, blocks: Iterable[Block], meta: dict[str, Any]) -> None:
        """Write the tables of the complete blocks, and `meta.json`: each file whole or not at all."""
        rows = sorted({row for block in blocks if self.complete(block) for row in block.rows})
        for table, columns in _COLUMNS.items():
            lines = [",".join((*columns, "time_us"))]
            for row in rows:
                if row.table == table:
                    named = (row.layer,) if row.layer else ()
                    lines.append(",".join(map(str, (*named, *row.sizes, f"{self.rows[row]['us']:.6g}"))))
            write_text(self.folder / f"{table}.csv", "\n".join(lines) + "\n")
        write_json(self.folder / META, meta)

    def _append(self, line: dict[str, Any]) -> None:
        try:
            with self._file.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line, sort_keys=True) + "\n")
        except OSError as error:
            raise RunFailed(f"could not write {self._file}: {error.strerror}") from None

    def _same(self, there: dict[str, Any], here: dict[str, Any]) -> None:
        differ = sorted(key for key in {*there, *here} if there.get(key) != here.get(key))
        if differ:
            key = differ[0]
            raise UserError(
                f"{self.folder} holds times of another set-up ({key}: {there.get(key)}, now {here.get(key)}); "
                "name another folder"
            )

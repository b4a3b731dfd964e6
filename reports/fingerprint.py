"""Tells whether a summary.json on the disk is what its run's records would give now.

The fingerprint stands in the summary's `run_facts`. It covers what the summary was made from (the plan,
every file of the records and of what was recomputed under other assumptions, the sources that turn them into
figures) and the summary itself, so a record that came or went, a changed formula and an edited summary all
show.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import harness
from harness.assumptions import FOLDER, LEFT_OUT
from harness.atomic import json_text
from harness.papers import Json
from harness.records import HTTP_PATH, PLAN

_ROOT = Path(harness.__file__).parent.parent
_SOURCES = (
    "harness/assumptions.py",
    "harness/cache_limits.py",
    "harness/failures.py",
    "harness/metrics/*.py",
    "harness/stats/*.py",
    "harness/papers.py",
    "harness/records.py",
    "harness/schema.py",
    "reports/comparisons.py",
    "reports/evaluated.py",
    "reports/live.py",
    "reports/noise.py",
    "reports/sensitivity.py",
    "reports/summary.py",
    "reports/unmeasured.py",
    "reports/wording.py",
)
_FIELD = re.compile(rb'"fingerprint": "([0-9a-f]{64})"')
_BLANK = b'"fingerprint": ""'


def inputs_digest(run_dir: Path) -> str:
    """Hash of what a run's summary is made from; record files by name, size and time of their last change."""
    digest = hashlib.sha256((run_dir / PLAN).read_bytes())
    for line in (*_record_lines(run_dir), *_source_lines()):
        digest.update(line.encode() + b"\0")
    return digest.hexdigest()


def stamped(summary: Json, inputs: str) -> Json:
    """The summary with its fingerprint; `inputs` is the digest from before its records were read."""
    blank = {**summary, "run_facts": {**summary["run_facts"], "fingerprint": ""}}
    own = _digest(inputs, json_text(blank).encode())
    return {**blank, "run_facts": {**blank["run_facts"], "fingerprint": own}}


def is_current(blob: bytes, inputs: str) -> bool:
    """True if these bytes of a summary.json are those that `stamped` gave for these inputs."""
    found = _FIELD.findall(blob)
    return len(found) == 1 and found[0].decode() == _digest(inputs, _FIELD.sub(_BLANK, blob))


def _digest(inputs: str, body: bytes) -> str:
    return hashlib.sha256(inputs.encode() + body).hexdigest()


def _record_lines(run_dir: Path) -> Iterator[str]:
    patterns = (
        "*/seed-*/*",
        f"{FOLDER}/*/{PLAN}",
        f"{FOLDER}/{LEFT_OUT}",
        HTTP_PATH,
        f"{FOLDER}/*/*/seed-*/*",
        "logs/*.failed.json",
    )
    for path in sorted(path for pattern in patterns for path in run_dir.glob(pattern)):
        facts = path.stat()
        yield f"{path.relative_to(run_dir)} {facts.st_size} {facts.st_mtime_ns}"


def _source_lines() -> Iterator[str]:
    for pattern in _SOURCES:
        for path in sorted(_ROOT.glob(pattern)):
            yield f"{path.relative_to(_ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}"

"""From a name on the command line to a Patch: one of the catalogue's, or any importable module with PATCH."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from types import ModuleType

from harness.errors import UserError
from patches.catalogue import BY_NAME, Entry
from patches.seam.patch import Patch, PatchDefinitionError


def find(name: str) -> Patch:
    """The patch called `name` (catalogue) or at the import path `name` (it contains a dot).

    Raises:
        UserError: unknown (with the nearest names), planned but not built, or a module that is no patch.
    """
    if "." in name:
        return _from_module(name)
    entry = BY_NAME.get(name)
    if entry is None:
        raise UserError(_unknown(name))
    if not entry.built:
        raise UserError(
            f"patch {name!r} ({entry.number}) is planned, not built yet; `bench patches` shows what is built"
        )
    patch = _from_module(entry.module)
    _check_entry(entry, patch)
    return patch


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, BY_NAME, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`bench patches` lists them"
    return f"unknown patch {name!r}: {hint} (a patch of your own is named by its import path, as my_pkg.my_patch)"


def _from_module(path: str) -> Patch:
    module = _load(path)
    patch = getattr(module, "PATCH", None)
    if not isinstance(patch, Patch):
        raise UserError(f"module {path!r} is no patch: it must hold PATCH = Patch(...)")
    return patch


def _load(path: str) -> ModuleType:
    if not all(part.isidentifier() for part in path.split(".")):
        raise UserError(f"{path!r} is not an import path; write it as my_pkg.my_patch")
    try:
        if _absent(path.split(".")[0]) and os.getcwd() not in sys.path:
            # As with `python -m`: a package in the current folder counts. Last, so that it shadows nothing.
            sys.path.append(os.getcwd())
            importlib.invalidate_caches()
        return importlib.import_module(path)
    except PatchDefinitionError as error:
        raise UserError(str(error)) from error
    except ModuleNotFoundError as error:
        raise UserError(
            f"cannot import the patch {path!r}: {error}; install its package or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:
        raise UserError(f"the patch {path!r} fails when imported: {type(error).__name__}: {error}") from error


def _absent(top: str) -> bool:
    return top not in sys.modules and importlib.util.find_spec(top) is None


def _check_entry(entry: Entry, patch: Patch) -> None:
    for field in ("name", "number", "area"):
        declared, expected = getattr(patch, field), getattr(entry, field)
        if declared != expected:
            raise UserError(f"{entry.module} declares {field} {declared!r}, the catalogue says {expected!r}")

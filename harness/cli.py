"""The command `bench`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import typer

from harness.errors import GateFailed, RunFailed, UserError

# Products of small matrices, beside other processes: a second thread only waits for its turn. Read by
# numpy's BLAS when it is first imported, which no command does before this module.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_COMMANDS = (
    "run_cmd",
    "serve_cmd",
    "keys_cmd",
    "identity_cmd",
    "sensitivity_cmd",
    "interference_cmd",
    "report_cmd",
    "compare_cmd",
    "patches_cmd",
    "workload_cmd",
    "trace_cmd",
    "calibrate_cmd",
    "validate_cmd",
    "step_error_cmd",
    "capacity_cmd",
    "perf_cmd",
    "profiles_cmd",
    "cache_cmd",
    "top_cmd",
)
_INTERRUPTED = 130
# typer carries a click of its own and names only the last of these classes in public.
_UsageError: Any = typer.BadParameter.__mro__[1]
_ClickError: Any = typer.BadParameter.__mro__[2]


def app() -> typer.Typer:
    """The application with all commands."""
    typer_app = typer.Typer(
        name="bench",
        help="Shows what each optimisation of vLLM really does: a five-phase, seven-tenant workload, replayed "
        "against the pinned vLLM with any set of patches, beside stock and beside upstream's own best flags.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name in _COMMANDS:
        importlib.import_module(f"harness.commands.{name}").register(typer_app)
    return typer_app


def main(arguments: list[str] | None = None) -> None:
    """Entry point: one line for what a user can act on, and the exit code that goes with it."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        result = app()(arguments, standalone_mode=False)
        sys.stdout.flush()
    except (UserError, RunFailed, GateFailed) as error:
        return _say(str(error), error.exit_code)
    except typer.Exit as done:
        result = done.exit_code
    except _UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "bench"
        return _say(f"{where}: {error.format_message()} (see {where} --help)", 2)
    except _ClickError as error:
        return _say(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return interrupted()
    except BrokenPipeError:
        # The reader of our output is gone (as with `| head`): nothing is wrong, and nothing can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _say(f"{where}{error.strerror or error}", 1)
    # typer turns Ctrl-C into an exit with this code, and an exit into a return value.
    if result == _INTERRUPTED:
        return interrupted()
    return result if isinstance(result, int) else 0


def interrupted() -> int:
    """What Ctrl-C leaves to be said."""
    return _say("interrupted; what was finished is kept, the same command goes on from there", _INTERRUPTED)


def _say(text: str, code: int) -> int:
    # One line, whatever a library put into its message.
    print(f"bench: {' '.join(text.split())}", file=sys.stderr)
    return code

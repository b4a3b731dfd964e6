"""How many token events a second the client takes per core, beside `vllm bench serve` and guidellm on the same server.

    python scripts/client_throughput.py [--rate 20000] [--seconds 10] [--tools ours,vllm,guidellm]

A mock server in a process of its own answers each request after a fixed time to the first token and then sends one
event, in one write, for each token, at a constant rate; streams start at a constant rate, so that their events are
spread. Every tool is offered the same requests at the same rate. Of each it is printed what arrived, the processor
time of its process while it drove, and what it took for the time to first token, which the server keeps at
a fixed value: what is over it is the tool's own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness import vllm_metadata  # noqa: E402
from harness.engines.live.client import Drive, Options, make_target  # noqa: E402
from harness.engines.live.priority import client_first  # noqa: E402
from harness.stats.measures import nearest_rank  # noqa: E402
from tests.live.fast_mock import FIRST_TOKEN_S, MODEL, PROMPT_TOKENS  # noqa: E402
from workloads.request import Phase, PlannedRequest, Segment, Tenant, Workload  # noqa: E402

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Offer:
    """What every tool is offered."""

    requests: int
    rate_rps: float
    tokens: int
    token_rate: float

    @property
    def events_per_s(self) -> float:
        """Token events a second once all streams run."""
        return self.rate_rps * self.tokens


class CpuWatch:
    """Notes a process's processor time every 20 ms, so that the part between two moments can be told."""

    def __init__(self, pid: int) -> None:
        self._pid, self._at, self._cpu = pid, [], []  # type: int, list[int], list[float]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def between(self, begin_ns: int, end_ns: int) -> float:
        """Seconds of processor time between two moments of CLOCK_MONOTONIC, children included."""
        self._over.set()
        self._thread.join()
        if not self._at:
            return float("nan")
        begin, end = np.interp([begin_ns, end_ns], self._at, self._cpu)
        return float(end - begin)

    def _run(self) -> None:
        while not self._over.wait(0.02):
            cpu_s = sum(_cpu_s(pid) for pid in _family(self._pid))
            if self._cpu and cpu_s < self._cpu[-1]:
                continue  # a child has gone, and its time with it
            self._at.append(time.monotonic_ns())
            self._cpu.append(cpu_s)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(grandchild for child in children for grandchild in _family(int(child)))]


def ours(url: str, offer: Offer, server: int) -> dict[str, Any]:
    """Our client, one worker, before the server's process `server` in the system's eyes, as in a live run."""
    tenant = Tenant("t", "gold", "chat", 1, 0, 1000.0, True)
    prompt, output = np.arange(PROMPT_TOKENS, dtype=np.int32), np.zeros(offer.tokens, np.int32)
    requests = tuple(
        PlannedRequest(
            i,
            f"r{i}",
            "t",
            1,
            round(i / offer.rate_rps * 1e9),
            prompt,
            output,
            (Segment("own", "p", PROMPT_TOKENS),),
        )
        for i in range(offer.requests)
    )
    load = Workload(
        "throughput",
        0,
        (tenant,),
        (Phase(1, "steady", 0, requests[-1].intended_ns + 1, True),),
        requests,
        "",
        "",
    )
    with Drive(load, make_target(url, MODEL), Options(), workers=1) as ready:
        first = client_first(ready.pids, [server])
        report = ready.run()
    good = [one for one in report.requests if one.status == "ok"]
    ttft = np.sort([(one.first_token_ns or 0) - one.intended_ns for one in good]) / 1e6
    late = report.lateness
    return {
        "ok": len(good),
        "tokens": sum(one.output_tokens for one in good),
        "reads": sum(use.chunks for use in report.workers),
        "cpu_s": sum(use.cpu_s for use in report.workers),
        "ttft_ms": [float(ttft.mean()), nearest_rank(ttft, 99)] if len(ttft) else None,
        "queued_s": sum(use.queued_s or 0.0 for use in report.workers),
        "lateness": late,
        "stall": report.client_stall,
        "priority": first,
    }


def vllm_bench(url: str, offer: Offer, folder: Path, tokenizer: str) -> dict[str, Any]:
    """`vllm bench serve` of the pin, on requests at a constant rate (burstiness high enough to be one)."""
    vllm_metadata.ensure()
    command = [
        *(
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "bench",
            "serve",
            "--backend",
            "openai",
            "--base-url",
            url,
        ),
        *(
            "--endpoint",
            "/v1/completions",
            "--model",
            MODEL,
            "--tokenizer",
            tokenizer,
            "--dataset-name",
            "random",
        ),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(offer.tokens), "--ignore-eos"),
        *(
            "--num-prompts",
            str(offer.requests),
            "--request-rate",
            str(offer.rate_rps),
            "--burstiness",
            "100000",
        ),
        *("--disable-tqdm", "--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"),
        *("--extra-body", '{"return_token_ids": true}', "--ready-check-timeout-sec", "0"),
    ]
    outcome = _watched(
        command, folder / "vllm.txt", {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}, url
    )
    if (folder / "vllm.json").is_file():
        said = json.loads((folder / "vllm.json").read_text())
        outcome |= {
            "ok": said["completed"],
            "tokens": said["total_output_tokens"],
            "ttft_ms": [said["mean_ttft_ms"], said["p99_ttft_ms"]],
        }
    return outcome


def guidellm(url: str, offer: Offer, folder: Path, program: str, tokenizer: str) -> dict[str, Any]:
    """guidellm's constant-rate benchmark."""
    command = [
        *(program, "benchmark", "--target", url, "--model", MODEL, "--processor", tokenizer),
        *("--rate-type", "constant", "--rate", str(offer.rate_rps), "--max-requests", str(offer.requests)),
        *("--data", f"prompt_tokens={PROMPT_TOKENS},output_tokens={offer.tokens}"),
        *("--output-path", str(folder / "guidellm.json")),
    ]
    outcome = _watched(command, folder / "guidellm.txt", {}, url)
    if (folder / "guidellm.json").is_file():
        bench = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]
        metrics = bench["metrics"]
        ttft = metrics["time_to_first_token_ms"]["successful"]
        outcome |= {
            "ok": ttft["count"],
            "tokens": round(metrics["output_token_count"]["successful"]["total_sum"]),
            "ttft_ms": [ttft["mean"], ttft["percentiles"]["p99"]],
        }
    return outcome


def _watched(command: list[str], log: Path, environment: dict[str, str], url: str) -> dict[str, Any]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | environment)
        watch = CpuWatch(process.pid)
        try:
            code = process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
    taken = _take(url)
    cpu_s = watch.between(taken["first_ns"], taken["last_ns"])
    last = log.read_text(errors="replace").strip().splitlines()[-1:] if code else []
    return {"cpu_s": cpu_s, "taken": taken, "failed": f"exit code {code}: {last}" if code else ""}


def _take(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/take", timeout=10) as answer:
        value: dict[str, Any] = json.load(answer)
    return value


def _word_tokenizer(folder: Path) -> str:
    """A tokenizer of a thousand words, enough for the tools that insist on one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return str(folder)


def _print(name: str, offer: Offer, outcome: dict[str, Any], taken: dict[str, Any]) -> None:
    if outcome.get("failed"):
        print(f"{name:18} failed: {outcome['failed']}")
        return
    wall_s = (taken["last_ns"] - taken["first_ns"]) / 1e9
    events, cpu_s = taken["events"], outcome["cpu_s"]
    mean, p99 = outcome.get("ttft_ms") or (float("nan"), float("nan"))
    print(
        f"{name:18} {outcome.get('ok', 0)}/{offer.requests} requests, {events} events in {wall_s:.1f} s = "
        f"{events / wall_s:,.0f}/s; {cpu_s:.1f} s of processor = {events / cpu_s:,.0f} events/s per core; "
        f"TTFT mean {mean:.1f} p99 {p99:.1f} ms (the server's: {FIRST_TOKEN_S * 1e3:.0f})"
    )
    if (late := outcome.get("lateness")) is not None:
        print(
            f"{'':18} send delay p50 {late.send_delay_ms_p50:.2f} p99 {late.send_delay_ms_p99:.2f} "
            f"max {late.send_delay_ms_max:.2f} ms; loop lag p99 {late.loop_lag_ms_p99:.2f} max {late.loop_lag_ms_max:.2f} ms; "
            f"read delay p99 {late.read_delay_ms_p99:.2f} ms; gc {late.gc_pauses} pauses {late.gc_total_ms:.1f} ms; "
            f"{outcome['queued_s']:.1f} s waited for a core; {outcome['tokens'] / max(1, outcome['reads']):.2f} tokens a read; {outcome['priority']}; verdict: {outcome['stall'] or 'fine'}"
        )


def main() -> int:
    """Run the tools one after another against one server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=20_000, help="token events a second that are offered")
    parser.add_argument("--seconds", type=float, default=10, help="for how long requests are sent")
    parser.add_argument("--tokens", type=int, default=100, help="output tokens a request")
    parser.add_argument("--token-rate", type=float, default=50, help="tokens a second within one stream")
    parser.add_argument("--tools", default="ours,vllm,guidellm", help="which of ours, vllm, guidellm")
    parser.add_argument(
        "--guidellm", default=shutil.which("guidellm") or "", help="path of the guidellm command"
    )
    args = parser.parse_args()
    rate_rps = args.rate / args.tokens
    offer = Offer(max(1, round(rate_rps * args.seconds)), rate_rps, args.tokens, args.token_rate)
    print(
        f"offered: {offer.requests} requests at {offer.rate_rps:g}/s, {offer.tokens} tokens each at {offer.token_rate:g}/s "
        f"= {offer.events_per_s:,.0f} token events a second, {offer.rate_rps * offer.tokens / offer.token_rate:.0f} streams at once"
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.live.fast_mock", str(args.token_rate), str(args.tokens)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    try:
        with tempfile.TemporaryDirectory(prefix="bench-throughput-") as name:
            folder = Path(name)
            tools = args.tools.split(",")
            tokenizer = _word_tokenizer(folder / "words") if set(tools) - {"ours"} else ""
            if "ours" in tools:
                outcome = ours(url, offer, server.pid)
                _print("this client", offer, outcome, _take(url))
            if "vllm" in tools:
                outcome = vllm_bench(url, offer, folder, tokenizer)
                _print("vllm bench serve", offer, outcome, outcome["taken"])
            if "guidellm" in tools and not args.guidellm:
                print(
                    f"{'guidellm':18} not installed: it is not in this project's lock; name one with --guidellm PATH"
                )
            elif "guidellm" in tools:
                outcome = guidellm(url, offer, folder, args.guidellm, tokenizer)
                _print("guidellm", offer, outcome, outcome["taken"])
    finally:
        server.communicate(timeout=10)
    return 0


if __name__ == "__main__":
    sys.exit(main())

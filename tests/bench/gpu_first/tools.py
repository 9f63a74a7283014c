"""Programs beside the bench: the driver's own word on the GPU, compute-sanitizer and ncu."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_first.step import REHEARSAL

EMULATED = "emulated GPU"
FOUND_SOMETHING = 86
"""Exit status that compute-sanitizer is told to use where the program ended well all the same."""
TOOLKIT = (Path("/usr/local/cuda/bin"), *sorted(Path("/opt/nvidia/nsight-compute").glob("*")))
"""Folders that CUDA's toolkit puts these programs in, and not always on PATH."""

NCU_SECTIONS = (
    "SpeedOfLight",
    "LaunchStats",
    "Occupancy",
    "SchedulerStats",
    "WarpStateStats",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
)
# The part of ncu's table that the page shows: (heading, metric).
NCU_METRICS = (
    ("us", "gpu__time_duration.sum"),
    ("DRAM %", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
    ("warps active %", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    ("issue active %", "smsp__issue_active.avg.pct_of_peak_sustained_active"),
    ("L2 hit %", "lts__t_sector_hit_rate.pct"),
    ("bank conflicts", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"),
    ("stall memory", "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"),
    ("stall barrier", "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"),
    ("stall math", "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio"),
    ("blocks by registers", "launch__occupancy_limit_registers"),
    ("blocks by shared memory", "launch__occupancy_limit_shared_mem"),
    ("registers", "launch__registers_per_thread"),
)


class NoGpu(RuntimeError):
    """There is no GPU; the message is that of the driver's tool."""


def gpu_line() -> str:
    """Name, driver and memory of the first GPU, by nvidia-smi. Raises NoGpu."""
    if os.environ.get(REHEARSAL):
        return EMULATED
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=10)
    except FileNotFoundError:
        raise NoGpu("there is no nvidia-smi") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoGpu(f"nvidia-smi does not work: {error}") from error
    said = next(iter(done.stdout.strip().splitlines()), "nothing").strip()
    if done.returncode or said == "nothing":
        raise NoGpu(f"nvidia-smi says: {said}")
    return said


def sanitized(tool: str, log: Path, command: Sequence[str]) -> list[str]:
    """The command under a tool of compute-sanitizer, which writes its findings to `log`."""
    options = ["--error-exitcode", str(FOUND_SOMETHING), "--report-api-errors", "no", "--print-limit", "20"]
    # PageKV's kernels alone: watching torch's takes many times as long.
    options += ["--kernel-name", "kernel_substring=pagekv", "--target-processes", "all", "--log-file", str(log)]
    return ["compute-sanitizer", "--tool", tool, *options, *command]


def names_a_fault(log: str) -> bool:
    """Whether memcheck found an access outside of all memory. Its exit status does not tell: the access ends the CUDA
    context, so the program fails, and then compute-sanitizer hands on the program's own status.
    """
    return "Invalid __global__" in log


def path_with_toolkit(path: str, folders: Sequence[Path] = TOOLKIT) -> str:
    """PATH with the folders of the toolkit that there are, behind what it has."""
    return os.pathsep.join([path, *(str(folder) for folder in folders if folder.is_dir())])


def profiled(log: Path, command: Sequence[str]) -> list[str]:
    """The command under ncu, which writes a table with a row a launch to `log`."""
    sections = [part for section in NCU_SECTIONS for part in ("--section", section)]
    options = ["--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    return ["ncu", *options, *sections, "--page", "raw", "--csv", "--log-file", str(log), *command]


def launches_of(output: str) -> list[dict[str, str]]:
    """ncu's table: for each launch, metric -> value with its unit. Raises ValueError where there is none."""
    lines = output.splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        said = [line for line in lines if line.startswith("==")]
        raise ValueError((said or lines or ["it said nothing"])[-1][:200])
    names, units, *rows = list(csv.reader(io.StringIO("\n".join(lines[first:]))))
    found = []
    for row in rows:
        if len(row) == len(names):
            named = zip(names, units, row, strict=True)
            found.append({name: f"{value} {unit}".strip() for name, unit, value in named})
    return found


def step_command(name: str, *arguments: str) -> list[str]:
    """Another step's process."""
    return [sys.executable, "-m", "gpu_first.step", name, *arguments]

"""What is known of GPUs before the first sample: which there are, or why there are none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Absent:
    """Why there is no GPU telemetry, which is no error.

    `code` is one of no_module, no_library, no_driver, driver_mismatch, no_permission, no_gpu, none_visible,
    no_answer, nvml_error.
    """

    code: str
    text: str

    def json(self) -> dict[str, str]:
        """As a manifest holds it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG slice of one, that a run was given.

    Attributes:
        uuid: what the rows of its samples carry.
        index: number of the physical GPU in the driver's order (that of nvidia-smi).
        name: the product's name; empty where the GPU did not answer.
        mig: the readings of power and energy are of a GPU that is split into slices, so they are not the run's own.
        sure: false where the number in CUDA_VISIBLE_DEVICES may mean another GPU: CUDA counts the fastest first
            unless CUDA_DEVICE_ORDER=PCI_BUS_ID, the driver counts by bus.
        fault: why the GPU could not be opened; empty where it could.
    """

    uuid: str
    index: int
    name: str
    mig: bool = False
    sure: bool = True
    fault: str = ""

    def json(self) -> dict[str, Any]:
        """As `gpu.parquet` and a manifest hold it."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Gpu:
        """The reverse of `json`; KeyError or TypeError where a field is missing or unknown."""
        return Gpu(**value)

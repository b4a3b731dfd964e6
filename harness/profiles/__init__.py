"""Calibrated GPU profiles: what a GPU and a model cost per engine step, as small data files."""

from __future__ import annotations

from harness.profiles.known_models import load_model, model_dir
from harness.profiles.load import list_profiles, load_profile, profile_for_device
from harness.profiles.model import StepTimeModel
from harness.profiles.profile import Profile

__all__ = [
    "Profile",
    "StepTimeModel",
    "list_profiles",
    "load_model",
    "load_profile",
    "model_dir",
    "profile_for_device",
]

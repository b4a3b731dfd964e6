"""Calibrated GPU profiles: what a GPU and a model cost per engine step, as small data files."""

from __future__ import annotations

from harness.profiles.model import StepTimeModel
from harness.profiles.profile import Profile, list_profiles, load_profile, model_dir

__all__ = ["Profile", "StepTimeModel", "list_profiles", "load_profile", "model_dir"]

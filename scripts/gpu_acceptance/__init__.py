"""Stages of `scripts/gpu_acceptance.sh`: one file each, `run` of which says what it found."""

"""`hflow doctor`: every engine that is installed does its work on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need


def run(setting: Setting) -> Figures:
    command = [sys.executable, "-m", "hflow.cli.app", "doctor", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    machine = report["machine"]
    figures = {
        "versions": machine["versions"],
        "devices": [device["name"] for device in machine["devices"]],
        "engines": {trial["engine"]: trial["state"] for trial in report["trials"]},
    }
    broken = [f"{t['engine']}: {t['message']}" for t in report["trials"] if t["state"] == "fails"]
    need(report["is_well"], "; ".join(broken) or "ports of this machine cannot be opened", figures)
    need(figures["engines"]["megatron"] == "works", "megatron was not tried", figures)
    if not machine["devices"]:
        raise Skipped("what is installed works; there is no GPU for it", figures)
    return figures


if __name__ == "__main__":
    main(run)

"""`hflow calibrate`: the rates of this device, and what share of its data sheet's the engine reaches."""

from __future__ import annotations

from hflow.plan.cluster_text import cluster_text
from hflow.runtime.tools.calibrate import calibrate
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need

FILE = "calibrated.yaml"  # in the folder of all stages


def run(setting: Setting) -> Figures:
    told: dict[str, str] = {}
    cluster = calibrate("acceptance", 1, told.__setitem__)
    (setting.folder / FILE).write_text(cluster_text(cluster))
    device, sheet = cluster.device, setting.cluster.device
    need(device.platform == setting.device.type, f"it measured a device of platform {device.platform}", {})
    shares = device.calibration
    figures: Figures = {
        "told": told,
        "flops": device.flops,
        "memory_bandwidth": device.memory_bandwidth,
        "host_bandwidth": cluster.host_link.bandwidth if cluster.host_link else None,
        "overhead_bytes": device.overhead_bytes,
        "layer_overhead_seconds": device.layer_overhead_s,
        "train_mfu": device.flops * shares.train_efficiency / sheet.flops,
        "score_mfu": device.flops * shares.score_efficiency / sheet.flops,
    }
    if not setting.on_gpu:
        raise Skipped("measured is this CPU, not a GPU", figures)
    need(device.flops > 0.3 * sheet.flops, "matrix products reach less than 0.3 of the data sheet's", figures)
    return figures


if __name__ == "__main__":
    main(run)

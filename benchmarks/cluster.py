"""What the cluster's parts take, on a Ray of this machine with CPU workers: seconds, printed; nothing is asserted.

    python -m benchmarks.cluster BASE [--jobs 2000]

BASE: a model's folder, as small as can be. The jobs that are only queued name a base that no worker gets.
"""

import argparse
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.cluster_utils import Cluster

from benchmarks import private_ray
from tlora.actors.scheduler import connect
from tlora.client import Client
from tlora.cluster import ClusterSpec
from tlora.files import sync_folder
from tlora.job import State
from tlora.spec import JobSpec, parse_job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--jobs", type=int, default=2000)
    arguments = parser.parse_args()
    with private_ray.started(num_cpus=8) as folder:
        measure(folder, arguments.base.absolute(), arguments.jobs)
    with private_ray.head() as (folder, cluster):
        measure_joining(folder, arguments.base.absolute(), cluster)
    with private_ray.autoscaled() as folder:
        measure_autoscaling(folder, arguments.base.absolute())


def job_in(folder: Path, name: str, model: Path, **changes: Any) -> JobSpec:
    rows = "".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(64))
    if not (path := folder / "rows.jsonl").exists():
        path.write_text(rows)
    values = {"name": name, "base": {"model": str(model)}, "data": {"path": str(path)}, "steps": 2}
    return parse_job({**values, "output": str(folder / "out" / name), **changes})


def measure_joining(folder: Path, base: Path, cluster: Cluster) -> None:
    connect(ClusterSpec(storage=str(folder), state=str(folder / "state"), gpus_per_worker=0, cpus_per_worker=2.0))
    client = Client()
    client.submit([job_in(folder, "waits", base)])
    until(lambda: get_cluster_status(cluster.address).resource_demands.placement_group_demand)
    cluster.add_node(num_cpus=2)
    say("node joined: first step of a job that waited", timed(lambda: until(lambda: step(client, "waits"))))
    client.down()


def measure_autoscaling(folder: Path, base: Path) -> None:
    """Of which an idle group's end takes one second, and an idle node's three, by these settings."""
    connect(ClusterSpec(storage=str(folder), state=str(folder / "state"), gpus_per_worker=0, cpus_per_worker=2.0,
                        idle_s=1.0))  # fmt: skip
    client = Client()
    client.submit([job_in(folder, "calls", base)])
    say("autoscaler: a node for a job that waits", timed(lambda: until(lambda: nodes() > 1)))
    say("… and its first step after", timed(lambda: until(lambda: step(client, "calls"))))
    client.wait(["calls"])
    say("… and no node any more once it has ended", timed(lambda: until(lambda: nodes() == 1)))
    client.down()


def nodes() -> int:
    """That are there, the head included."""
    return sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]


def measure(folder: Path, base: Path, count: int) -> None:
    def job(name: str, model: Path = base, **changes: Any) -> JobSpec:
        return job_in(folder, name, model, **changes)

    settings = ClusterSpec(storage=str(folder), state=str(folder / "state"), gpus_per_worker=0, max_workers=1)
    say("scheduler started", timed(lambda: connect(settings)))
    client = Client()
    client.submit([job("cold")], check=False)
    say("cold start: first step of the first job", timed(lambda: until(lambda: step(client, "cold") > 0)))
    client.wait(["cold"])
    client.submit([job("warm")], check=False)
    say("warm group: first step", timed(lambda: until(lambda: step(client, "warm") > 0)))
    client.submit([job("long", steps=100_000)], check=False)
    until(lambda: step(client, "long") > 3)
    worker = client.workers()[0]
    client.submit([job("beside", steps=100_000)], check=False)
    until(lambda: step(client, "beside") > 0)
    say("a tick of the first job once another has come", client.workers()[0]["tick_s"])
    client.submit(
        [job("third", steps=100_000, data={"path": str(folder / "rows.jsonl"), "max_length": 64})], check=False
    )
    scheduler = process_id(client)
    os.kill(scheduler, signal.SIGKILL)
    say("scheduler killed: another answers after", timed(lambda: until(lambda: process_id(client) != scheduler)))
    say("… and has heard of the workers after", timed(lambda: until(client.workers)))
    os.kill(worker["pid"], signal.SIGKILL)
    say("worker killed: another in its place after", timed(lambda: until(lambda: fresh(client, worker["pid"]))))
    client.cancel(["long", "third"])  # the one that is left holds the only worker, so that others wait
    queued = [job(f"q{n}", folder / "no-base") for n in range(count)]
    gc.disable()  # a collection of all that this process has imported would be taken for an admission
    times_s, bare_s = [], []
    for number, each in enumerate(queued):
        times_s.append(timed(partial(client.submit, [each], check=False)))
        bare_s.append(timed(partial(write, folder / "bare", number)) + timed(partial(process_id, client)))
    gc.enable()
    say_all(f"admission of one of {count} jobs", times_s)
    say_all("… its writes and an empty call alone", bare_s)
    say(f"status of {count} jobs", timed(client.status))
    status = Path(f"/proc/{process_id(client)}/status").read_text().splitlines()
    (memory,) = (int(line.split()[1]) / 2**20 for line in status if line.startswith("VmRSS"))
    print(f"{'scheduler memory':<48} {memory:9.3f} GiB", flush=True)
    client.cancel(["beside", *(f"q{n}" for n in range(count))])
    say("down", timed(client.down))


def write(folder: Path, number: int) -> None:
    """What an admission waits for on the disk, bare: a log that grows, and an object."""
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("ab") as log:
        log.write(bytes(20_000))
        log.flush()
        os.fdatasync(log.fileno())
    with (folder / "object.incomplete").open("wb") as file:
        file.write(bytes(1000))
        file.flush()
        (folder / "object.incomplete").rename(folder / str(number))
        os.fsync(file.fileno())
    sync_folder(folder)


def say_all(what: str, times_s: Sequence[float]) -> None:
    say(f"{what}, mean", sum(times_s) / len(times_s))
    for permille in (990, 999, 1000):
        say(f"{what}, {permille / 10:g} %", sorted(times_s)[max(len(times_s) * permille // 1000 - 1, 0)])
    print(f"{f'{what}, above 20 ms':<48} {sum(each > 0.02 for each in times_s):9d}", flush=True)


def say(what: str, seconds: float) -> None:
    print(f"{what:<48} {seconds:9.3f} s", flush=True)


def timed(run: Callable[[], object]) -> float:
    began_s = time.monotonic()
    run()
    return time.monotonic() - began_s


def until(seen: Callable[[], Any]) -> None:
    while not seen():
        time.sleep(0.02)


def process_id(client: Client) -> int:
    return int(client._call("process_id"))


def step(client: Client, name: str) -> int:
    (row,) = client.status([name])
    if row["state"] == State.FAILED:
        raise RuntimeError(f"job {name} failed: {row['reason']}")
    return int(row["step"])


def fresh(client: Client, before: int) -> bool:
    return any(worker["pid"] != before and worker["base_loads"] for worker in client.workers())


if __name__ == "__main__":
    main()

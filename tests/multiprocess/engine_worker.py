"""An engine of several processes: process 0 has the loop, the others follow it. Process 0 prints tokens as JSON.

    engine_worker.py FOLDER MESH HANG [--coordinator HOST:PORT --processes N --process-id I]

With HANG "yes" process 0 goes on with requests until it is ended.
"""

import argparse
import json
import pathlib
import sys
import time

from scalejax.inference import generate, loop, processes
from scalejax.inference.requests import Request
from scalejax.inference.sampling import TokenSampling
from scalejax.models.llm import model_folder
from scalejax.parallel.mesh import make_mesh, parse_mesh
from scalejax.train import distributed, peers


def finished(on):
    found = {}
    while on.busy:
        for chunk in on.step():
            key = f"{chunk.request}.{chunk.sample}"
            found[key] = found.get(key, []) + list(chunk.tokens)
            if chunk.prompt_logprobs:
                found[f"{key} likelihoods"] = [round(one.logprob, 3) for one in chunk.prompt_logprobs[1:]]
    return found


def requests(on):
    for begin, end, count in ((0, 5, 20), (10, 200, 30), (220, 221, 7)):
        on.submit(
            Request(
                prompt=tuple(range(begin % 90, begin % 90 + 1)) + tuple(i % 90 for i in range(begin, end)),
                max_tokens=count,
            )
        )
    on.submit(Request(prompt=(4, 5, 6, 7), max_tokens=6, samples=2, sampling=TokenSampling(temperature=1.0, seed=5)))
    on.submit(Request(prompt=tuple(range(40)), max_tokens=0, prompt_logprobs=0))
    return finished(on)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("mesh")
    parser.add_argument("hang")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    arguments = parser.parse_args()
    distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id, peer_timeout_s=8)
    engine = generate.load(model_folder.open_folder(arguments.folder), make_mesh(parse_mesh(arguments.mesh)))
    on = loop.make_loop(engine, slots=8, kv_tokens=2048, page=16)
    if arguments.processes is None:
        print(json.dumps(requests(on)))
        return 0
    peers.job.loses = ""
    if arguments.process_id:
        processes.follow(on.steps, processes.called())
        return 0
    followers = on.steps.others = processes.call_others()
    print(json.dumps(requests(on)), flush=True)
    while arguments.hang == "yes":
        on.submit(Request(prompt=(1, 2, 3), max_tokens=100))
        finished(on)
        time.sleep(0.1)
    followers.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`scalejax doctor`: what this machine has, whether it works, and what is missing."""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import stat
from typing import Annotated, Any

import typer

import scalejax
from scalejax.cli import environment, options, output

_PACKAGES = (
    "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy", "flax", "optax", "orbax-checkpoint",
    "grain", "pyarrow", "polars", "pydantic", "typer", "rich", "torch",
)  # fmt: skip
_VARIABLES = (
    "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PJRT_NPROC", environment.CACHE_VARIABLE, "XLA_FLAGS", "LIBTPU_INIT_ARGS",
)  # fmt: skip


def doctor(
    json: options.Json = False,
    selftest: Annotated[
        bool, typer.Option("--selftest/--no-selftest", help="Run the collectives over all devices.")
    ] = True,
    cpu_devices: options.CpuDevices = None,
    coordinator: options.Coordinator = None,
    processes: options.Processes = None,
    process_id: options.ProcessId = None,
) -> None:
    """Check this machine.

    Versions and those known to be bad, devices, mesh, a test of the collectives, what each extra lacks, compile cache.

    Exit status 1 if no device comes up or a collective gives a wrong value.
    """
    asked = "JAX_PLATFORMS" in os.environ
    environment.prepare(cpu_devices=cpu_devices)
    needed = None if asked else environment.platform_without_tpu()
    from scalejax.cli import advisories, requirements
    from scalejax.parallel.mesh import host_memory_bytes

    installed = versions()
    with output.native_output_to_stderr():
        machine = _devices(coordinator, processes, process_id, selftest)
    report = {
        "scalejax": scalejax.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": host_memory_bytes(),
        "packages": installed,
        **machine,
        "compile_cache": _compile_cache(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "advisories": [
            dataclasses.asdict(a)
            for a in (*advisories.advisories(installed, machine["platform"]), *advisories.mismatches(installed))
        ],
        "jax_platforms_needed": needed,
        "missing": {extra: requirements.missing(extra) for extra in requirements.EXTRAS},
    }
    report["healthy"] = machine["problem"] is None and all(v == "ok" for v in machine["selftest"].values())
    if machine["primary"] or not report["healthy"]:  # of several healthy processes one report is enough
        if json:
            output.print_json(report)
        else:
            _print(report)
    if not report["healthy"]:
        raise typer.Exit(1)


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter; absent ones are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _devices(coordinator: str | None, processes: int | None, process_id: int | None, selftest: bool) -> dict[str, Any]:
    import jax

    from scalejax.cli import selftest as collectives
    from scalejax.parallel import mesh as meshes
    from scalejax.train import distributed

    report: dict[str, Any] = {
        "primary": True,
        "platform": None,
        "devices": [],
        "processes": 0,
        "mesh": {},
        "selftest": {},
    }
    distributed.initialize(coordinator, processes, process_id)
    try:
        devices = jax.devices()
    except RuntimeError as error:  # what jax raises where a named platform does not come up
        return {**report, "problem": str(error).partition("\n")[0]}
    mesh = meshes.make_mesh(meshes.MeshShape(), devices)
    return {
        "problem": None,
        "primary": distributed.is_primary(),
        "platform": devices[0].platform,
        "processes": jax.process_count(),
        "devices": [
            {"id": d.id, "kind": d.device_kind, "process": d.process_index, "memory_bytes": _limit(d)} for d in devices
        ],
        "mesh": dict(mesh.shape),
        "selftest": collectives.run(mesh) if selftest else {},
    }


def _limit(device: Any) -> int | None:
    local = device.process_index == device.client.process_index()
    statistics = device.memory_stats() if local else None
    return statistics.get("bytes_limit") if statistics else None


def _compile_cache() -> dict[str, str | None]:
    if environment.CACHE_VARIABLE not in os.environ:
        return {"folder": None, "mode": None, "problem": environment.make_private(environment.cache_folder())}
    folder = pathlib.Path(os.environ[environment.CACHE_VARIABLE])
    if not folder.is_dir():
        return {"folder": str(folder), "mode": None, "problem": None}  # jax makes it
    mode = f"{stat.S_IMODE(folder.stat().st_mode):04o}"
    return {"folder": str(folder), "mode": mode, "problem": environment.privacy_problem(folder)}


def _print(report: dict[str, Any]) -> None:
    from rich import markup, table

    console = output.console()

    def section(title: str, rows: list[tuple[str, str]]) -> None:
        shown = table.Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        shown.add_column(no_wrap=True)
        shown.add_column()
        for row in rows:
            shown.add_row(*map(markup.escape, row))
        console.print(shown)
        console.print()

    memory = report["memory_bytes"]
    section(
        "Machine",
        [
            ("scalejax", report["scalejax"]),
            ("python", report["python"]),
            ("system", report["system"]),
            ("CPU cores", str(report["cpu_count"])),
            ("memory", _gib(memory)),
            *((name, value) for name, value in report["environment"].items()),
        ],
    )
    section("Versions", list(report["packages"].items()))
    kinds: dict[tuple[str, int | None], int] = {}
    for device in report["devices"]:
        key = (device["kind"], device["memory_bytes"])
        kinds[key] = kinds.get(key, 0) + 1
    section(
        "Devices",
        [("problem", report["problem"])]
        if report["problem"]
        else [
            *((f"{n} x {kind}", f"memory {_gib(limit)}" if limit else "") for (kind, limit), n in kinds.items()),
            ("processes", str(report["processes"])),
            ("mesh", ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items())),
        ],
    )
    section("Collectives", list(report["selftest"].items()) or [("not run", "")])
    cache = report["compile_cache"]
    state = cache["problem"] or f"mode {cache['mode']}"
    section("Compile cache", [(str(cache["folder"] or "not used"), state)])
    section(
        "Known-bad versions",
        [(f"{a['package']} {report['packages'][a['package']]}", f"{a['problem']}. {a['advice']} ({a['source']})")
         for a in report["advisories"]] or [("none of these installed", "")],
    )  # fmt: skip
    if report["jax_platforms_needed"] is not None:
        advice = "libtpu is installed and no TPU is here: without it, programs of yours look for one first"
        section("Programs of yours", [(f"set JAX_PLATFORMS={report['jax_platforms_needed']}", advice)])
    section(
        "Extras",
        [
            (f"scalejax[{extra}]", "complete" if not lacks else "missing " + ", ".join(lacks))
            for extra, lacks in report["missing"].items()
        ],
    )


def _gib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"

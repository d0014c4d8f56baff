"""Settings that jax reads from the environment when it is imported, made before it is.

Every variable is only a default: what the user has set stays. Three things are decided here.

Compile cache: a folder of this user alone (mode 0700), because whoever can write there can run code in this process. It
has one sub-folder per CPU type, so that a home folder that several hosts share never serves machine code that this
host's CPU cannot run. Everything is cached, small programs too: a second start of the same recipe compiles nothing.

Platform: with libtpu installed (it is a compiler too, `scalejax plan` needs it) jax would look for a TPU first, which
takes a while and prints a page of complaints on a machine without one. Where no TPU device node exists, the platform is
therefore named: CUDA if its plugin and a device are there, else the CPU. Without libtpu jax finds out by itself.

Virtual CPU devices (`--cpu-devices N` or JAX_NUM_CPU_DEVICES): threads for their collectives. A device that waits for
the others in a collective keeps its thread, and two collectives of one program wait at the same time where neither
needs the other. jax starts one thread a device: on a machine of few cores all of them then wait, some for the first
collective and some for the second, until XLA ends the process after 40 seconds.
"""

import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import stat
import sys

from scalejax.errors import UserError

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_THREADS_A_DEVICE = 8
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def prepare(*, cpu_devices: int | None = None) -> None:
    """Sets the environment of jax; call it before anything imports jax.

    Args:
      cpu_devices: Number of virtual CPU devices, or None for the devices of the machine.

    Raises:
      UserError: virtual CPU devices are asked for while JAX_PLATFORMS names another platform.
    """
    if cpu_devices is not None:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if platforms and platforms != "cpu":
            raise UserError(
                f"--cpu-devices {cpu_devices}: JAX_PLATFORMS is {platforms!r}, which excludes virtual CPU devices. "
                "Unset it, or leave --cpu-devices out."
            )
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
    devices = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    if devices.isdecimal() and int(devices) > 1:
        os.environ.setdefault("PJRT_NPROC", str(_THREADS_A_DEVICE * int(devices)))
    named = platform_without_tpu()
    if named is not None:
        os.environ.setdefault("JAX_PLATFORMS", named)
    if CACHE_VARIABLE not in os.environ:
        folder = cache_folder()
        problem = make_private(folder)
        if problem is None:
            os.environ[CACHE_VARIABLE] = str(folder)
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
        else:
            print(f"Compile cache not used: {problem}", file=sys.stderr)


def platform_without_tpu(device_root: pathlib.Path = pathlib.Path("/dev")) -> str | None:
    """The platform to name on this machine, or None where jax should find out by itself."""
    libtpu = importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ
    if not libtpu or has_tpu(device_root):
        return None
    gpu = any(device_root.glob("nvidia[0-9]*")) and any(importlib.util.find_spec(name) for name in _CUDA_PLUGINS)
    return "cuda,cpu" if gpu else "cpu"


def has_tpu(device_root: pathlib.Path = pathlib.Path("/dev")) -> bool:
    """Whether a TPU device node exists (a numbered VFIO group may also be something else: then jax looks)."""
    return any(device_root.glob("accel[0-9]*")) or any(device_root.glob("vfio/[0-9]*"))


def cache_folder() -> pathlib.Path:
    """Where compiled programs are kept: in the user's cache folder, apart by CPU type."""
    base = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    try:
        match = re.search(r"^(flags|Features)\s*:.*$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    cpu = f"{platform.machine()} {platform.processor()} {match.group(0) if match else ''}"
    return pathlib.Path(base) / "scalejax" / f"jax-{hashlib.sha256(cpu.encode()).hexdigest()[:8]}"


def make_private(folder: pathlib.Path) -> str | None:
    """Makes the folder and its parent with mode 0700 if not there. Returns what is wrong with it, or None."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror}). Set {CACHE_VARIABLE} to a folder that only you can write."
    return privacy_problem(folder)


def privacy_problem(folder: pathlib.Path) -> str | None:
    """What is wrong with the owner or the mode of a cache folder, or None."""
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return f"{folder} belongs to another user. Set {CACHE_VARIABLE} to a folder of yours."
    if mode & 0o022:
        return (
            f"{folder} can be written by others (mode {mode:04o}), who could run code as you through it. "
            "Delete it; it is made anew with mode 0700."
        )
    if not os.access(folder, os.W_OK):
        return f"{folder} cannot be written. Set {CACHE_VARIABLE} to a folder that only you can write."
    return None

#!/usr/bin/env python3
"""What a machine has to run a bundle on: `python3 device.py cuda` (or `cpu`) prints it as a JSON object.

run.py starts it as a process of its own, because a driver may hang.
"""

import ctypes
import json
import os
import sys
import time


def driver_name():
    return os.environ.get("MLCC_CUDA_DRIVER") or "libcuda.so.1"


def probe_cuda():
    """Name, compute capability, driver and copy bandwidth of GPU 0, through the driver API."""
    cuda = ctypes.CDLL(driver_name())

    def call(name, *args):
        status = getattr(cuda, name)(*args)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")

    size, pointer = ctypes.c_size_t, ctypes.c_uint64
    call("cuInit", 0)
    count, device = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    if count.value < 1:
        raise RuntimeError("there is no NVIDIA GPU")
    call("cuDeviceGet", ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(256)
    call("cuDeviceGetName", name, 256, device)
    found = {"device": name.value.decode(errors="replace"), "devices": count.value}
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        capability.append(str(value.value))
    found["capability"] = ".".join(capability)
    version, memory = ctypes.c_int(), size()
    if hasattr(cuda, "cuDriverGetVersion") and cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        found["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if hasattr(cuda, "cuDeviceTotalMem_v2") and cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0:
        found["memory_bytes"] = memory.value
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    # Much more than the caches hold.
    buffer_bytes = min(1 << 30, (found.get("memory_bytes") or 1 << 28) // 8)
    buffers = [pointer(), pointer()]
    for buffer in buffers:
        call("cuMemAlloc_v2", ctypes.byref(buffer), size(buffer_bytes))

    def copies(number):
        begin = time.perf_counter()
        for _ in range(number):
            call("cuMemcpyDtoDAsync_v2", buffers[1], buffers[0], size(buffer_bytes), None)
        call("cuStreamSynchronize", None)
        return number * 2 * buffer_bytes / max(time.perf_counter() - begin, 1e-9)

    copies(3)
    found["copy_bytes_per_s"] = max(copies(20) for _ in range(3))
    for buffer in buffers:
        call("cuMemFree_v2", buffer)
    call("cuDevicePrimaryCtxRelease_v2", device)
    return found


def probe_cpu():
    name = "CPU"
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            name = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), name)
    except OSError:
        pass
    length = 64 << 20
    source, target = bytearray(b"\1") * length, bytearray(length)
    to = (ctypes.c_char * length).from_buffer(target)
    begin_of = (ctypes.c_char * length).from_buffer(source)
    rates = []
    for _ in range(4):
        begin = time.perf_counter()
        ctypes.memmove(to, begin_of, length)
        rates.append(2 * length / (time.perf_counter() - begin))
    return {"device": name, "copy_bytes_per_s": max(rates), "copy_threads": 1}


def missing_driver():
    try:
        ctypes.CDLL(driver_name())
        return None
    except OSError as error:
        return f"no NVIDIA driver on this machine ({error})"


if __name__ == "__main__":
    print(json.dumps(probe_cuda() if sys.argv[1] == "cuda" else probe_cpu()))

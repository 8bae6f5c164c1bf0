"""All probes, under the headings of the report."""

from __future__ import annotations

from mokfx.doctor.finding import Probe
from mokfx.doctor.gpus import gpus, links
from mokfx.doctor.providers import providers
from mokfx.doctor.ranks import ranks
from mokfx.doctor.software import caches, compilers, software

PROBES: dict[str, Probe] = {
    "software": software,
    "compilers": compilers,
    "caches": caches,
    "GPUs": gpus,
    "links": links,
    "ranks": ranks,
    "the op": providers,
}

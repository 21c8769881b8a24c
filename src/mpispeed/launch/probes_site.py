"""Probe of the file of site defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mpispeed.base.errors import ConfigError
from mpispeed.base.site_file import SYSTEM_FILE, VARIABLE, SiteFile, current
from mpispeed.launch.findings import Finding, Verdict

AREA = "site"


def check_site(environ: Mapping[str, str], count_defaults: Callable[[SiteFile], int]) -> Iterator[Finding]:
    """All findings of this area.

    Args:
        environ: that may name the file.
        count_defaults: the number of settings in the file; raises ConfigError where they have mistakes.
    """
    try:
        site = current(environ)
    except ConfigError as error:
        yield Finding(AREA, "site file", Verdict.FAIL, str(error), "no run begins with it: ask who owns it")
        return
    if not site.path:
        yield Finding(AREA, "site file", Verdict.INFO, f"no {SYSTEM_FILE}, and {VARIABLE} is not set")
        return
    yield Finding(AREA, "site file", Verdict.OK, f"{site.path} of {site.owner}")
    yield from _contents(site, environ, count_defaults)


def _contents(
    site: SiteFile, environ: Mapping[str, str], count_defaults: Callable[[SiteFile], int]
) -> Iterator[Finding]:
    try:
        count = count_defaults(site)
    except ConfigError as error:
        yield Finding(AREA, "defaults", Verdict.FAIL, str(error), "no run begins with it: ask who owns the file")
        return
    yield Finding(AREA, "defaults", Verdict.INFO, f"{count}; mpispeed config explain shows them")
    if site.locked:
        yield Finding(AREA, "locked", Verdict.INFO, ", ".join(site.locked))
    if site.profile:
        yield Finding(AREA, "profile", Verdict.INFO, site.profile)
    if site.environment:
        others = sorted(name for name, value in site.environment.items() if environ.get(name, value) != value)
        what = ", ".join(sorted(site.environment)) + (f"; set otherwise here: {', '.join(others)}" if others else "")
        yield Finding(AREA, "environment", Verdict.INFO, what)

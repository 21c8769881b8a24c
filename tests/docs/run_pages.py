"""Runs the blocks marked run of pages: in order, in one namespace, in an empty folder of the page.

    python -m tests.docs.run_pages FOLDER PAGE...                   pages of one rank, each in a fork of this process
    mpirun -n 2 python -m tests.docs.run_pages FOLDER PAGE...       pages of two, one after the other in these ranks

torch is imported once. FOLDER/report.json gets page -> {"ran": how many blocks, "failed": "" or where and why,
"cpu_seconds": of forks and commands}.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import mpispeed
from tests.docs.scenes import SCENES, plain_names
from tests.helpers.code_blocks import ROOT, Block, Command, Page, commands_of, is_shown, read_page

LIMIT_SECONDS = float(os.environ.get("MPISPEED_DOCS_LIMIT", "240"))
"""Of one page; a page takes a few seconds on an idle core."""

OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "HYDRA_", "MPISPEED_", "PRTE_")
IMPORTED_ONCE = (
    "mpispeed.engine.api",
    "mpispeed.compression",
    "mpispeed.flops",
    "mpispeed.optim",
    "torch._dynamo",
    "h5py",
)
"""For all forks; none of them joins MPI, which a fork could not use."""

EXAMPLES = ROOT / "docs" / "examples"


class Failed(Exception):
    """A block that did not do what its page says."""


class Runner:
    """Runs one page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.names = plain_names()
        self.ran = 0
        self._scenes = list(page.scenes)

    def run(self) -> None:
        """All blocks; scenes where they stand.

        Raises:
            Failed: With page and line.
        """
        for block in self.page.blocks:
            if block.file and is_first():
                Path(block.file).write_text(block.text)
        blocks = self.page.blocks
        for number, block in enumerate(blocks):
            if block.mark != "run":
                continue
            self._set_scenes(block.line)
            following = blocks[number + 1] if number + 1 < len(blocks) else None
            shown = following.text if following is not None and following.shows else None
            (self._run_python if block.language == "python" else self._run_console)(block, shown)
            self.ran += 1

    def _set_scenes(self, line: int) -> None:
        while self._scenes and self._scenes[0].line < line:
            scene = self._scenes.pop(0)
            for name in scene.names:
                if name not in SCENES:
                    message = f"{self.page.name}:{scene.line}: no scene {name!r}; there are {', '.join(SCENES)}"
                    raise Failed(message)
                SCENES[name](self.names)

    def _run_python(self, block: Block, shown: str | None) -> None:
        source = "\n" * block.line + block.text
        name = str(ROOT / block.page)
        linecache.cache.pop(name, None)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(source, name, "exec", dont_inherit=True), self.names)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = next((frame.lineno for frame in reversed(frames) if frame.filename == name), block.line)
            if isinstance(error, SyntaxError) and error.filename == name:
                line = error.lineno
            message = f"{block.page}:{line}: {''.join(traceback.format_exception(error))}"
            raise Failed(message) from None
        if shown is not None and is_first():
            _compare(block, shown, printed.getvalue())

    def _run_console(self, block: Block, shown: str | None) -> None:
        if is_first():
            printed = "".join(_run_command(self.page.name, command) for command in commands_of(block))
            if shown is not None:
                _compare(block, shown, printed)
        wait_for_first()


def _compare(block: Block, shown: str, printed: str) -> None:
    if not is_shown(shown, printed):
        message = f"{block.place}: it does not print what the page shows, but\n{printed}"
        raise Failed(message)


def _run_command(page: str, command: Command) -> str:
    """Run it by bash as a user does; what it prints on both channels."""
    done = subprocess.run(
        ["bash", "-c", command.text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
        check=False,
    )
    if done.returncode != command.exit_code:
        ended = f"exit code {done.returncode}, not {command.exit_code}"
        message = f"{page}:{command.line}: {command.text}\n{ended}\n{done.stdout}"
        raise Failed(message)
    return done.stdout


def clean_environment() -> dict[str, str]:
    """That of a shell: the commands of this environment first, nothing of a launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    commands = Path(sys.executable).parent  # of the environment: not resolved
    return kept | {
        "PATH": f"{commands}{os.pathsep}{kept.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(EXAMPLES)]),
        "MPISPEED_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }


def is_first() -> bool:
    """True on the rank that writes and compares."""
    return not mpispeed.comm.is_initialized() or mpispeed.comm.get_rank() == 0


def wait_for_first() -> None:
    """Wait until the first rank has come here."""
    if mpispeed.comm.is_initialized():
        mpispeed.comm.barrier()


def run_here(page: Page, folder: Path) -> dict[str, Any]:
    """Run a page in this process."""
    os.chdir(folder)
    runner = Runner(page)
    failed = ""
    try:
        runner.run()
    except Failed as error:
        failed = str(error)
    except Exception:
        failed = f"{page.name}: its scene failed\n{traceback.format_exc()}"
    os.chdir(folder.parent)
    return {"ran": runner.ran, "failed": failed}


def end_program() -> None:
    """End this fork as a program ends, with threads, hooks and MPI, but do not take torch apart, which is a second."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_in_fork(page: Page, folder: Path) -> dict[str, Any]:
    """Run a page in a child of its own, which is ended with its children when it is late."""
    log, result, inside = folder / "log.txt", folder / "result.json", folder / "page"
    inside.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            result.write_text(json.dumps(run_here(page, inside)))
        finally:
            end_program()
    until = time.monotonic() + LIMIT_SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"ran": 0, "failed": f"{page.name}: still ran after {LIMIT_SECONDS:.0f} s\n{log.read_text()}"}
        time.sleep(0.02)
    if not result.exists():
        return {"ran": 0, "failed": f"{page.name}: the process ended by itself\n{log.read_text()}"}
    found: dict[str, Any] = json.loads(result.read_text())
    if found["failed"]:
        found["failed"] += f"\n{log.read_text()[-4000:]}"
    return found


def run_on_ranks(page: Page, folder: Path) -> dict[str, Any]:
    """Run a page on all ranks; the first failure ends the job, since the other ranks would wait."""
    if is_first():
        folder.mkdir(parents=True)
    wait_for_first()
    found = run_here(page, folder)
    if found["failed"]:
        sys.stderr.write(found["failed"])
        sys.stderr.flush()
        os._exit(1)
    wait_for_first()
    return found


def main(folder: str, *names: str) -> None:
    """Run the pages and write the report."""
    for file in sorted(Path(__file__).parent.glob("scenes_*.py")):
        importlib.import_module(f"tests.docs.{file.stem}")
    sys.path.insert(0, str(EXAMPLES))
    pages = [read_page(name) for name in names]
    is_job = any(page.ranks > 1 for page in pages)
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    if is_job:
        mpispeed.init_distributed()
    run = run_on_ranks if is_job else run_in_fork
    gc.freeze()  # forks do not copy what is there by looking through it
    found, used = {}, 0.0
    for number, page in enumerate(pages):
        found[page.name] = run(page, Path(folder, str(number)))
        times = os.times()
        total = times.children_user + times.children_system
        found[page.name]["cpu_seconds"], used = round(total - used, 2), total
    if is_first():
        Path(folder, "report.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

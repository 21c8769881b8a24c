"""The command line of `zero_to_fp32.py`, which `save_checkpoint` puts beside `latest`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.base.errors import CheckpointError
from mpispeed.compat.fp32 import convert_zero_checkpoint_to_fp32_state_dict

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the fp32 weights of a checkpoint, as the options say; returns the exit code.

    Options as those of DeepSpeed's script of that name.
    """
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that has `latest` and the folders of tags")
    parser.add_argument("output_dir", help="a folder, or a file ending in .bin, .pt, .pth or .safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of a file in a folder, such as 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors into the folder")
    parser.add_argument("-t", "--tag", default=None, help="the checkpoint; by default the one that `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="show the stack of an error")
    given = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            Path(given.checkpoint_dir),
            Path(given.output_dir),
            given.tag,
            exclude_frozen_parameters=given.exclude_frozen_parameters,
            max_shard_size=given.max_shard_size,
            safe_serialization=given.safe_serialization,
        )
    except (CheckpointError, ValueError, OSError) as error:
        if given.debug:
            raise
        sys.stderr.write(f"zero_to_fp32.py: {error}\n")
        return 1
    return 0

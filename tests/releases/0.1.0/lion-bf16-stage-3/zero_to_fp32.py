#!/usr/bin/env python
# Writes the fp32 weights of a checkpoint: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT [--tag TAG]
from mpispeed.compat.fp32_script import main

raise SystemExit(main())

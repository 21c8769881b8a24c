"""The version of this library; the package build reads it here, so that installation and checkout agree."""

VERSION = "0.1.0"

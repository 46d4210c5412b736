"""Fetch a model into the cache, so that later runs need no network.

Without a name it is the small model that comes with tandem.
"""

import argparse
import sys

from tandem.cli.progress import waiting

EPILOG = """
examples:
  tandem pull                                  the embedded model, 98 MB
  tandem pull Qwen/Qwen3-0.6B                  a model of the Hugging Face hub
  tandem pull owner/name/file.gguf             one GGUF file of the hub

The embedded model is kept in $TANDEM_CACHE, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem; models of the hub where
the hub's own tools keep them ($HF_HOME).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a Hugging Face id; default: the embedded model")


def main(arguments: argparse.Namespace) -> int:
    from tandem.engine.build import pull

    with waiting() as screen:
        path = pull(arguments.model, on_progress=screen.download)
    if sys.stderr.isatty():
        print("the model is at:", file=sys.stderr)
    print(path)
    return 0

#!/bin/sh
# Train a small model on your own text, measure it and let it write.
#   sh examples/own_text.sh letters.txt             # a file, or a folder of .txt and .md files
#   sh examples/own_text.sh letters/ --steps 2000   # further settings go to `nsa train`
# On a CPU it takes a few minutes. On a GPU replace cpu-small by gpu-small, or by 78m-shared for
# 79M parameters; for more than some hundred MB of text run `nsa data prepare` first (docs/data.md).
set -eu
text=$1
shift
python -m nsa train cpu-small --run-dir runs/own-text --data.source folder --data.path "$text" "$@"
python -m nsa eval runs/own-text
python -m nsa generate runs/own-text --prompt "The " --max-new-tokens 200

#!/usr/bin/env bash
# Both stages of `mini`, and its figures:  recipes/mini/train.sh ../shared/data runs/mini
set -euo pipefail
here=$(dirname "$0") data=$1 output=$2
python "$here/train.py" --data "$data/train" --output "$output/first"
python "$here/train.py" --data "$data/train" --dev "$data/dev" --output "$output/second" \
    --from-artifact "$output/first/artifact" --steps 1000 --lr 5e-5 --projection-lr 5e-4 \
    --statements 0.25 --teacher 0.5 0.3 --seed 1

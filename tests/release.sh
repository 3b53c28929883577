#!/bin/sh
# Builds wheel and sdist into dist/, and tries them in fresh environments, each command in an empty folder; run by
# `make test-release`. usage: sh tests/release.sh PYTHON [EXTRA...]   (default: every extra that is pinned)
#
# The core is installed alone, from the wheel and from the sdist. An extra is installed in an environment that sees the
# core's and nothing else, so that an extra that needs another one is found.
set -eu
python=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install="-m pip --disable-pip-version-check install -qq --constraint $root/constraints.txt"

say() { echo "[release] $*"; }
# An empty folder, no cache of the user, and no network for models.
inside() {
	mkdir -p "$work/empty/$1" && cd "$work/empty/$1"
	shift
	env -u PYTHONPATH HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$@"
}

say "building with $("$python" --version)"
"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip --disable-pip-version-check install -qq build
rm -rf "$root/dist"
"$work/build/bin/python" -m build --outdir "$root/dist" "$root" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
wheel=$(ls "$root"/dist/*.whl)
sdist=$(ls "$root"/dist/*.tar.gz)

for built in "$wheel" "$sdist"; do
	name=core-${built##*.}
	say "the core alone from ${built##*/}"
	"$python" -m venv "$work/$name"
	# shellcheck disable=SC2086
	"$work/$name/bin/python" $install "$built"
	gnomon=$work/$name/bin/gnomon
	inside "$name" "$gnomon" --version
	inside "$name" "$gnomon" train tiny steps=3 --run-dir run >"$work/out" 2>&1 || { cat "$work/out"; exit 1; }
	inside "$name" "$gnomon" report run >/dev/null
	inside "$name" "$gnomon" doctor run >/dev/null
	inside "$name" "$gnomon" compare tiny --algorithms grpo,rloo --seeds 1 --steps 2 --workers 1 >/dev/null 2>&1
	inside "$name" "$gnomon" completion bash >/dev/null
	inside "$name" "$work/$name/bin/python" -c "import gnomon; assert gnomon.load('run').steps == 3, gnomon.__version__"
	# What the core does without says which extra brings it.
	said=$(inside "$name" "$gnomon" plan tiny task.kind=reasoning_gym task.generator=chain_sum 2>&1) && exit 1
	case $said in *"pip install reasoning-gym"*) ;; *) echo "$said"; exit 1 ;; esac
done

# What an extra brings, by a program that uses it.
use() {
	case $1 in
	tasks) echo "from gnomon.cli.main import main; assert main(['tasks', 'chain_sum']) == 0" ;;
	math) echo "import math_verify" ;;
	lora) echo "import gnomon; gnomon.train('tiny', steps=1, lora={'rank': 4}, rollouts_per_step=16)" ;;
	tables) echo "import datasets, gnomon; rows = datasets.Dataset.from_list([{'prompt': f'{a}+{b}=', 'answer': str(a + b)} for a in range(5) for b in range(5)]); gnomon.train(model='tiny', dataset=rows, rewards=['exact'], steps=1, rollouts_per_step=16, max_completion_length=3)" ;;
	grammar) echo "import gnomon; gnomon.train('tiny', steps=1, rollouts_per_step=16, sampling={'grammar': {'regex': '[0-9]{1,2}'}})" ;;
	default-model) echo "import gguf" ;;
	tensorboard) echo "import gnomon; gnomon.train('tiny', steps=1, rollouts_per_step=16, records={'sinks': ['tensorboard']})" ;;
	watch) echo "import textual" ;;
	notebook) echo "import gnomon; print(len(gnomon.train('tiny', steps=2, rollouts_per_step=16).metrics.to_pandas()))" ;;
	cluster) echo "import gnomon; gnomon.train('tiny', steps=1, rollouts_per_step=16, cluster='ray')" ;;
	esac
}

[ $# -gt 0 ] || set -- tasks math lora tables grammar default-model tensorboard watch notebook cluster
core=$("$work/core-whl/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for extra in "$@"; do
	say "gnomon[$extra]"
	"$python" -m venv "$work/extra"
	own=$("$work/extra/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	printf '%s\n' "$core" >"$own/core.pth"
	# shellcheck disable=SC2086
	"$work/extra/bin/python" $install "${wheel}[$extra]"
	use "$extra" >"$work/use.py"
	echo 'if __name__ == "__main__":' >"$work/guarded.py"
	sed 's/^/    /' "$work/use.py" >>"$work/guarded.py"
	inside "$extra" "$work/extra/bin/python" "$work/guarded.py" >"$work/out" 2>&1 || { cat "$work/out"; exit 1; }
	rm -rf "$work/extra"
done
say "the digests of constraints.lock"
"$work/build/bin/python" -m pip --disable-pip-version-check install -qq --dry-run --no-deps --require-hashes --requirement "$root/constraints.lock"
say "dist/ has what was tried: ${wheel##*/}, ${sdist##*/}"

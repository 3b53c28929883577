#!/bin/sh
# Writes constraints.lock and docker/cuda.lock, with the digests of every file of each version; run by `make lock`.
# usage: sh tests/lock.sh PYTHON [PLACE]   (PLACE: where the CPU wheel of PyTorch is found, as of `pip --find-links`)
#
# A uv.lock would name the address of the registry that it was made from; digests are the same wherever a file lies.
set -eu
python=$1
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/uv"
"$work/uv/bin/python" -m pip --disable-pip-version-check install -qq uv
version=$("$python" -c 'import platform; print(platform.python_version())')
compile() {
	"$work/uv/bin/uv" pip compile --quiet --generate-hashes --no-header --no-annotate --python-version "$version" "$@"
}
compile --no-deps --output-file "$work/all" "$root/constraints.txt"
torch=$(grep '^torch==' "$root/constraints.txt")
echo "$torch" >"$work/torch"
compile --python-platform x86_64-unknown-linux-gnu --constraint "$root/constraints.txt" --output-file "$work/cuda" "$work/torch"
"$python" -m pip --disable-pip-version-check download -qq --no-deps ${2:+--find-links "$2"} --dest "$work" "$torch"
wheel=$(ls "$work"/torch-*.whl)
digest=$("$python" -m pip --disable-pip-version-check hash "$wheel" | grep -o 'sha256:.*')
{
	echo "# constraints.txt with the digests of every file: of Linux, macOS and Windows, of Python 3.11 and newer."
	echo "#   pip install --no-deps --require-hashes -r constraints.lock && pip install --no-deps ."
	echo "# torch has the digests of its plain wheels, and of the CPU wheel ${wheel##*/};"
	echo "# the plain wheel for Linux needs CUDA's libraries too: -r docker/cuda.lock. Written by make lock."
	"$python" - "$work/all" "$digest" <<-'PYTHON'
		import sys
		from pathlib import Path

		text, digest = Path(sys.argv[1]).read_text(), sys.argv[2]
		at = text.index("\ntorch==") + 1
		first = text.index("    --hash=", at)
		print(text[:first] + ("" if digest in text else f"    --hash={digest} \\\n") + text[first:], end="")
	PYTHON
} >"$root/constraints.lock"
{
	echo "# CUDA's libraries for torch's plain wheel on Linux (x86-64), beside constraints.lock. Written by make lock."
	"$python" - "$work/cuda" "$work/all" <<-'PYTHON'
		import re
		import sys
		from pathlib import Path

		cuda, known = (re.split(r"\n(?=\S)", Path(name).read_text().rstrip()) for name in sys.argv[1:])
		names = {entry.partition("==")[0] for entry in known}
		print("\n".join(entry for entry in cuda if entry.partition("==")[0] not in names))
	PYTHON
} >"$root/docker/cuda.lock"

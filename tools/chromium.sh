#!/bin/sh
# Make sure that there is a Chromium for `make test-app`; on Debian it is installed if it is missing.
set -eu
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then
        exit 0
    fi
done
advice="install Chromium so that 'chromium' is on the PATH (Debian: apt-get install chromium), then run make test-app again"
if ! command -v apt-get >/dev/null; then
    echo "Chromium is missing, and there is no apt-get to install it: $advice" >&2
    exit 1
fi
sudo=""
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "Chromium is missing, and installing it needs root: $advice" >&2
        exit 1
    fi
    sudo="sudo"
fi
if ! { $sudo apt-get update --quiet && $sudo apt-get install --yes --quiet --no-install-recommends chromium; }; then
    echo "Chromium is missing, and apt-get could not install it: $advice" >&2
    exit 1
fi

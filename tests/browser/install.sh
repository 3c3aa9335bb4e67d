#!/bin/sh
# Debian's Chromium, where this may be installed; else it says why not, and the tests skip.
set -e
if ! command -v apt-get >/dev/null; then
    echo "no Chromium: there is no apt-get here; install it by hand for these tests"
    exit 0
fi
as_root=
if [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "no Chromium: only root may install it: sudo apt-get install chromium"
        exit 0
    fi
    as_root="sudo -n"
fi
export DEBIAN_FRONTEND=noninteractive
if ! { $as_root apt-get update -q && $as_root apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core; }; then
    echo "no Chromium: apt-get could not install it"
fi

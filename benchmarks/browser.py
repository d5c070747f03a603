"""Headless Chromium for the benchmark and the pictures of a report. It uses Debian's chromium and chromium-driver."""

import os
import shutil
from typing import Any

from selenium import webdriver


def browser(*, width: int, height: int, scheme: str) -> Any:
    """Start Chromium with a window of this size in pixels. `scheme` is light or dark."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--disable-dev-shm-usage", "--force-device-scale-factor=1", "--hide-scrollbars"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.binary_location = shutil.which("chromium") or ""
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return driver

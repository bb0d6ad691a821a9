"""An application that records the weather: run it with ``twistd -n -y recorder.py``."""

from twisted.application.service import Application
from twisted.internet import reactor

from sbus.recorder import RecorderService, Settings

application = Application("weather")
recorder = RecorderService(
    reactor,
    "weather-journal",  # a directory; created if there is none
    "weather.sock",
    Settings(patterns=(b"weather/",), sync=5.0, keep_days=365),
)
recorder.setServiceParent(application)

"""Clouds that say beforehand that they will take this machine away.

metadata server  →  Aws, Gcp, Azure (`poll`)  →  NoticeWatcher (a thread)  →  the guard
"""

from reprieve.preemption.notices.detection import clouds
from reprieve.preemption.notices.poller import Notice, NoticeWatcher

__all__ = ["Notice", "NoticeWatcher", "clouds"]

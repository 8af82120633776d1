"""Clouds that say beforehand that they will take this machine away.

metadata server  →  Aws, Gcp, Azure (`poll`)  →  NoticeWatcher (a thread)  →  the guard
"""

from reprieve.preemption.notices.choose import clouds
from reprieve.preemption.notices.watcher import Notice, NoticeWatcher

__all__ = ["Notice", "NoticeWatcher", "clouds"]

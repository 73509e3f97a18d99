import asyncio
import time


async def longest_turn(done):
    """Return the longest iteration of the loop until `done`, in seconds of this thread's CPU time."""
    longest = 0.0
    async with asyncio.timeout(60):
        while not done():
            began = time.thread_time()  # not the clock: another process may have the core in between
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)
    return longest

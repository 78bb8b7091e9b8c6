"""Ctrl-C at random moments ends a run of tasks with KeyboardInterrupt each time, and the next run works.

test_loop_signals interrupts programs at chosen points.
"""

from __future__ import annotations

import pytest
from support import PROCESS_CAP_S, interrupt_at_random


@pytest.mark.only_on("asyncio", "grapeshot")
@pytest.mark.watchdog(2 * PROCESS_CAP_S)
def test_tasks(loop_kind):
    interrupt_at_random(
        loop_kind,
        """
        async def work(chance, lock):
            loop = asyncio.get_running_loop()
            near, far = socket.socketpair()
            with near, far:
                near.setblocking(False)
                far.setblocking(False)
                while True:
                    action = chance.randrange(8)
                    if action == 0:
                        await asyncio.sleep(0)
                    elif action == 1:
                        await asyncio.sleep(chance.random() / 1000)
                    elif action == 2:
                        await loop.sock_sendall(near, b"data")
                        assert await loop.sock_recv(far, 4) == b"data"
                    elif action == 3:
                        async with lock:
                            await asyncio.sleep(0)
                    elif action == 4:
                        await asyncio.gather(*(asyncio.sleep(0) for _ in range(5)))
                    elif action == 5:
                        task = asyncio.create_task(asyncio.sleep(1000))
                        await asyncio.sleep(0)
                        task.cancel()
                        await asyncio.wait([task])
                    elif action == 6:
                        await asyncio.to_thread(int)
                    else:
                        loop.call_later(0, loop.call_soon, int)

        async def main(number, began):
            chance, lock = random.Random(SEED + number), asyncio.Lock()
            async with asyncio.TaskGroup() as group:
                for _ in range(chance.randrange(10)):  # without tasks, the loop only polls
                    group.create_task(work(chance, lock))
                await asyncio.sleep(0)
                began()
                await asyncio.sleep(1000)

        def run(number, began):
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(main(number, began))
        """,
    )

from raybatch_lab.simulator.clock import VirtualClock


def test_events_happen_in_order_of_time_and_then_of_entry():
    clock, seen = VirtualClock(), []
    for name, time_s in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        clock.at(time_s, lambda name=name: seen.append((name, clock.now)))
    clock.run(lambda: False)
    assert seen == [("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_an_event_in_the_past_happens_now():
    clock, seen = VirtualClock(), []
    clock.at(2.0, lambda: clock.at(1.0, lambda: seen.append(clock.now)))
    clock.run(lambda: False)
    assert seen == [2.0]

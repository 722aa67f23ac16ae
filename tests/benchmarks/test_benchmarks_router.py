"""Simulation of the router with eight servers and ten thousand heavy-tailed episodes: load is balanced, prefixes are
reused, and the loss of a server costs only the requests in flight."""

from benchmarks.router import Simulation, make_episodes, settings
from rally.engines.router.routing_policy import RoutingPolicy


def test_load_is_even_prefixes_are_found_and_a_death_costs_only_what_was_in_flight() -> None:
    episodes = make_episodes(10_000, seed=1)
    simulation = Simulation(RoutingPolicy(settings(seed=1)), 8, episodes, at_once=1024)
    simulation.at(60.0, lambda: simulation.kill("s3"))
    simulation.at(120.0, lambda: simulation.revive("s3"))
    outcome = simulation.run()
    assert outcome.finished_turns == sum(len(e.turns) for e in episodes), "every turn was answered exactly once"
    assert outcome.imbalance < 0.10 and outcome.crowding < 1.10
    assert outcome.hit_rate > 0.95
    assert outcome.lost_at_death > 50 and outcome.failed_tries == outcome.lost_at_death
    assert outcome.counts.get("given_up", 0) == 0
    lived = 1 - 60.0 / outcome.seconds
    mean = sum(outcome.loads[name] for name in outcome.survivors) / 7
    assert outcome.loads["s3"] > 0.8 * lived * mean, "it has its share again after it came back"

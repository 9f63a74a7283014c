"""The engine loop has everything that services may ask for."""

from __future__ import annotations

from support.engine.engine_harness import config

from pagekv.kvmanager.engine.interface import Engine
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.queries import EngineQueries


def test_the_loop_is_an_engine_without_a_model_before_it_is_attached() -> None:
    engine: Engine = EngineLoop(config())
    assert engine.model is None
    assert isinstance(engine.queries, EngineQueries)
    assert {name for name in vars(Engine) if not name.startswith("_")} <= set(dir(engine))

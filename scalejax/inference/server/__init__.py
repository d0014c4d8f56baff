"""The HTTP server of a language model, with the protocol of OpenAI, or of an exported click model (extra `serve`).

`docs/serving.md` says how to use it. `protocol` reads bodies, `loop_thread` owns the loop of the engine, `answers`
makes texts and JSON of what it brings, `app` has the routes, `scores` those of a click model and its batches, `metrics`
what Prometheus asks for, and `serving` runs it all until a signal.
"""

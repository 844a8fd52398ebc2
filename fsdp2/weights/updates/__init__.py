"""Weights for inference engines: whole, or what changed since the last update. From the top down.

sender    WeightSender: decides what an update sends, and delivers it
receiver  WeightReceiver: writes buckets to tensors, and refuses those that do not follow what it has
link      where buckets go: a function, or a process group with receivers, and what both sides say to each other
collect   buckets on the first rank, made of what the ranks hold
plan      the tensors that are sent, the parts of them that each rank holds, and buckets of bounded size
mapping   names, splits and joins: the tensors of an engine, made of those of a model
bucket    WeightBucket: one message, a flat buffer and what is in it
delta     which elements of a part changed, and the smallest exact form in which to send them
"""

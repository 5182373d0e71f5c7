"""Episodes of a client: begin and end, API keys, undelivered ends in the spool, and the answers that agents received.

Runs in every client process, over RabbitMQ or HTTP. Offers `client.EpisodeClient` and `episode.AsyncEpisode`. Never imports
`client.runners`.
"""

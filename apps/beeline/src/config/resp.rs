//! `[resp]`: the door for Redis clients.

use super::values::{Door, Number, OrderWord, Secret, Size, Span, Threshold};
use super::{Rules, knobs};

knobs! {
    /// The Redis door.
    pub struct RespConfig, table "resp" {
        address: Door = "127.0.0.1:6379" earlier "resp-address", "Where Redis clients connect; off closes the door, port 0 picks a free one.";
        max_clients: Number = "10000" earlier "max-clients", "Redis connections served at once.";
        require_password: Secret = "" earlier "require-password", "Password Redis clients must give. Prefer the file or BEELINE_RESP_REQUIRE_PASSWORD: flags show in process lists.";
        idle_timeout: Span = "0" earlier "idle-timeout", "A Redis connection silent for this long is closed; 0 is never.";
        output_buffer_limit: Size = "256MiB" earlier "output-buffer-limit", "Replies one client may leave unread before it is closed; 1MiB or more.";
        query_buffer_limit: Size = "1GiB" earlier "query-buffer-limit", "Bytes of one incomplete request before its client is closed, 1MiB to 4GiB; the default is Redis'.";
        slow_log: Threshold = "off", "Redis commands at least this long are kept for SLOWLOG, as in 10ms; every command is then timed, else one of 32 (LATENCY, /metrics).";
        pipeline_order: OrderWord = "strict", "Whether pipelined requests of one connection take effect in their order on keys of different shards too, as with Redis and also after a crash (strict), or as if they came from different clients, which is faster with several shards (relaxed).";
    }
}

impl RespConfig {
    /// The rules over several values.
    pub fn check(&self, rules: &mut Rules<'_>) {
        rules.rule(
            "resp-max-clients",
            self.max_clients.0 > 0,
            "0 would serve no client; use --resp-address off to close the door",
        );
        rules.rule(
            "resp-output-buffer-limit",
            self.output_buffer_limit.0 >= 1 << 20,
            "less than 1MiB would close honest clients; raise it",
        );
        rules.rule(
            "resp-query-buffer-limit",
            (1 << 20..=1 << 32).contains(&self.query_buffer_limit.0),
            "choose 1MiB to 4GiB",
        );
    }
}

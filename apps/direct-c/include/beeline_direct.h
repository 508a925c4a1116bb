/* The direct store of a Beeline node, for C: docs/direct.md.
 *
 * A client belongs to the thread that uses it; open one per thread. Every call returns a
 * beeline_direct_status; what went wrong in words is beeline_direct_error of the client.
 * Numbers are little-endian elements of 1, 2, 4 or 8 bytes ("width").
 */
#ifndef BEELINE_DIRECT_H
#define BEELINE_DIRECT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct beeline_direct beeline_direct;

typedef enum {
    BEELINE_DIRECT_OK = 0,
    BEELINE_DIRECT_NOT_FOUND = 1,
    BEELINE_DIRECT_FULL = 2,
    BEELINE_DIRECT_TOO_LONG = 3,
    BEELINE_DIRECT_MALFORMED = 4,
    BEELINE_DIRECT_UNKNOWN_FUNCTION = 5,
    BEELINE_DIRECT_LENGTH_MISMATCH = 6,
    /* Keys are being moved between servers and one of the call did not come to rest in the time given:
     * operations of a batch whose status is still this one were not executed. Ask again. */
    BEELINE_DIRECT_MOVED = 7,
    /* The connection failed: what was under way may have taken effect. The next call connects anew. */
    BEELINE_DIRECT_UNREACHABLE = 64,
    /* An argument is not what the call needs. */
    BEELINE_DIRECT_USAGE = 65
} beeline_direct_status;

typedef enum {
    BEELINE_DIRECT_ADD = 1,
    BEELINE_DIRECT_SUBTRACT = 2,
    BEELINE_DIRECT_MAX = 3,
    BEELINE_DIRECT_MIN = 4,
    BEELINE_DIRECT_AND = 5,
    BEELINE_DIRECT_OR = 6,
    BEELINE_DIRECT_XOR = 7,
    BEELINE_DIRECT_EXCHANGE = 8,
    /* Its parameter is the expected element, then the new one. */
    BEELINE_DIRECT_COMPARE_AND_SWAP = 9,
    BEELINE_DIRECT_ADD_FLOAT = 10,
    BEELINE_DIRECT_MAX_FLOAT = 11
} beeline_direct_function;

typedef enum {
    BEELINE_DIRECT_GET = 1,
    BEELINE_DIRECT_PUT = 2,
    BEELINE_DIRECT_DELETE = 3,
    BEELINE_DIRECT_UPDATE_SCALAR = 4,
    BEELINE_DIRECT_UPDATE_VECTOR_BY_SCALAR = 5,
    BEELINE_DIRECT_UPDATE_VECTOR = 6,
    BEELINE_DIRECT_REDUCE = 7,
    BEELINE_DIRECT_FILTER = 8
} beeline_direct_kind;

/* One operation of a batch. The caller fills the first part and keeps what it points to until the call
 * returns; the call fills the second. */
typedef struct {
    const void *key;
    size_t key_length;
    /* Value, parameter or initial sum; NULL without one. */
    const void *value;
    size_t value_length;
    /* Where the result's bytes go; NULL where only the status is wanted. */
    void *result;
    size_t result_capacity;
    uint8_t kind;
    uint8_t function;
    uint8_t width;
    /* Out. */
    uint8_t status;
    /* Bytes of the result, which may be more than the capacity: then only the first came. */
    size_t result_length;
} beeline_direct_operation;

/* Connects to the nodes that hold a map together, apart by commas: "auto://127.0.0.1:4790". NULL where that
 * fails, with the reason in `error`, cut to its capacity. */
beeline_direct *beeline_direct_connect(const char *servers, uint32_t timeout_ms,
                                       char *error, size_t error_capacity);

/* Ends a client; NULL is let pass. */
void beeline_direct_close(beeline_direct *client);

/* What the last call of this client said, or an empty text. Until the next call. */
const char *beeline_direct_error(const beeline_direct *client);

/* Executes operations, in their order for each key. OK: each has its own status. */
beeline_direct_status beeline_direct_execute(beeline_direct *client,
                                             beeline_direct_operation *operations, size_t count);

/* The value of a key, cut to the capacity; its length in `length`. */
beeline_direct_status beeline_direct_get(beeline_direct *client, const void *key, size_t key_length,
                                         void *value, size_t capacity, size_t *length);

beeline_direct_status beeline_direct_put(beeline_direct *client, const void *key, size_t key_length,
                                         const void *value, size_t value_length);

beeline_direct_status beeline_direct_delete(beeline_direct *client, const void *key, size_t key_length);

/* Adds to an 8-byte number, wrapping; the number before in `before`. */
beeline_direct_status beeline_direct_fetch_add(beeline_direct *client, const void *key,
                                               size_t key_length, uint64_t by, uint64_t *before);

/* Stores `new_value` in an 8-byte number that is `expected`; the number before in `before`. */
beeline_direct_status beeline_direct_compare_and_swap(beeline_direct *client, const void *key,
                                                      size_t key_length, uint64_t expected,
                                                      uint64_t new_value, uint64_t *before);

#ifdef __cplusplus
}
#endif
#endif

/* Counters, a lock and a batch in the direct store of a node.
 *
 *   beeline serve &
 *   cargo build --package beeline-direct-c
 *   cc -Iapps/direct-c/include apps/direct-c/examples/counter.c -Ltarget/debug -lbeeline_direct -o counter
 *   LD_LIBRARY_PATH=target/debug ./counter auto://127.0.0.1:4790
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "beeline_direct.h"

#define NEED(call)                                                                     \
    do {                                                                               \
        int status = (call);                                                           \
        if (status != BEELINE_DIRECT_OK) {                                             \
            fprintf(stderr, "%s: %d %s\n", #call, status, beeline_direct_error(store)); \
            return 1;                                                                  \
        }                                                                              \
    } while (0)

int main(int count, char **words) {
    char error[200];
    const char *servers = count > 1 ? words[1] : "auto://127.0.0.1:4790";
    beeline_direct *store = beeline_direct_connect(servers, 5000, error, sizeof error);
    if (store == NULL) {
        fprintf(stderr, "%s\n", error);
        return 3;
    }
    uint64_t number = 40, before = 0;
    NEED(beeline_direct_put(store, "c:counter", 9, &number, sizeof number));
    NEED(beeline_direct_fetch_add(store, "c:counter", 9, 2, &before));
    NEED(beeline_direct_compare_and_swap(store, "c:counter", 9, 42, 7, &before));
    printf("it was %" PRIu64 "\n", before);

    /* Four operations in one packet. */
    uint32_t weights[3] = {1, 0, 3}, ten = 10, zero = 0, sum = 0, nonzero[3];
    beeline_direct_operation batch[4];
    memset(batch, 0, sizeof batch);
    for (int i = 0; i < 4; i++) {
        batch[i].key = "c:weights";
        batch[i].key_length = 9;
        batch[i].function = BEELINE_DIRECT_ADD;
        batch[i].width = 4;
    }
    batch[0].kind = BEELINE_DIRECT_PUT;
    batch[0].value = weights;
    batch[0].value_length = sizeof weights;
    batch[1].kind = BEELINE_DIRECT_FILTER;
    batch[1].result = nonzero;
    batch[1].result_capacity = sizeof nonzero;
    batch[2].kind = BEELINE_DIRECT_UPDATE_VECTOR_BY_SCALAR;
    batch[2].value = &ten;
    batch[2].value_length = sizeof ten;
    batch[3].kind = BEELINE_DIRECT_REDUCE;
    batch[3].value = &zero;
    batch[3].value_length = sizeof zero;
    batch[3].result = &sum;
    batch[3].result_capacity = sizeof sum;
    NEED(beeline_direct_execute(store, batch, 4));
    for (int i = 0; i < 4; i++)
        if (batch[i].status != BEELINE_DIRECT_OK) return 1;
    printf("%zu are not zero, the sum is %" PRIu32 "\n", batch[1].result_length / 4, sum);

    NEED(beeline_direct_delete(store, "c:counter", 9));
    char value[8];
    size_t length = 0;
    int found = beeline_direct_get(store, "c:counter", 9, value, sizeof value, &length);
    printf("%s\n", found == BEELINE_DIRECT_NOT_FOUND ? "gone" : "still there");
    if (beeline_direct_get(store, "", 0, value, sizeof value, &length) != BEELINE_DIRECT_USAGE) return 1;
    if (strstr(beeline_direct_error(store), "1 to 255") == NULL) return 1;
    beeline_direct_close(store);
    return 0;
}

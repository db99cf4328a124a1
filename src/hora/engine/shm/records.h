/* The records of one direction (`Records` of net/noise.py), one at a time: the same bytes, by the libcrypto that Python uses
 * itself, whose functions `stream.py` has looked up. Included by native.c alone.
 */
enum { TAG_BYTES = 16, GET_TAG = 0x10, SET_TAG = 0x11 }; /* EVP_CTRL_AEAD_... */

struct records {
    void *context; /* an EVP_CIPHER_CTX that has the key, and whether it seals */
    int (*begin)(void *, const void *, void *, const unsigned char *, const unsigned char *, int); /* EVP_CipherInit_ex */
    int (*update)(void *, unsigned char *, int *, const unsigned char *, int);                     /* EVP_CipherUpdate */
    int (*end)(void *, unsigned char *, int *);                                                    /* EVP_CipherFinal_ex */
    int (*control)(void *, int, int, void *);                                                      /* EVP_CIPHER_CTX_ctrl */
    unsigned char *room; /* for a record */
    uint64_t number;     /* of the next one, which is its nonce */
};

static int begin_record(struct records *records) {
    unsigned char nonce[12] = {0};
    for (int i = 0; i < 8; i++) nonce[4 + i] = (unsigned char)(records->number >> (56 - 8 * i));
    records->number++;
    return records->begin(records->context, NULL, NULL, NULL, nonce, -1) == 1;
}

static int pass_through(struct records *records, void *out, const void *data, int num_bytes) {
    int n = 0, rest = 0;
    return records->update(records->context, out, &n, data, num_bytes) == 1 && n == num_bytes &&
           records->end(records->context, (unsigned char *)out + n, &rest) == 1;
}

/* Make the record of these bytes in the room, the tag behind it. Whether it could be done. */
static int seal(struct records *records, const void *data, int num_bytes) {
    return begin_record(records) && pass_through(records, records->room, data, num_bytes) &&
           records->control(records->context, GET_TAG, TAG_BYTES, records->room + num_bytes) == 1;
}

/* Decrypt where it is what has come; its tag is in the room. Whether it is the record that was sent. */
static int unseal(struct records *records, void *data, int num_bytes) {
    return begin_record(records) &&
           records->control(records->context, SET_TAG, TAG_BYTES, records->room + num_bytes) == 1 &&
           pass_through(records, data, data, num_bytes);
}

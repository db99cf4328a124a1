/* The records of one direction (`Records` in net/noise.py), one at a time: the same bytes, encrypted by the libcrypto that
 * Python uses, whose functions `stream.py` looks up. Included by native.c alone.
 */
enum { TAG_BYTES = 16, GET_TAG = 0x10, SET_TAG = 0x11 }; /* EVP_CTRL_AEAD_... */

struct records {
    void *context; /* an EVP_CIPHER_CTX with the key and the direction */
    int (*begin)(void *, const void *, void *, const unsigned char *, const unsigned char *, int); /* EVP_CipherInit_ex */
    int (*update)(void *, unsigned char *, int *, const unsigned char *, int);                     /* EVP_CipherUpdate */
    int (*end)(void *, unsigned char *, int *);                                                    /* EVP_CipherFinal_ex */
    int (*control)(void *, int, int, void *);                                                      /* EVP_CIPHER_CTX_ctrl */
    unsigned char *room; /* buffer for a record */
    uint64_t number;     /* number of the next record, its nonce */
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

/* Encrypt these bytes as a record in the buffer, followed by the tag. Return whether that succeeded. */
static int seal(struct records *records, const void *data, int num_bytes) {
    return begin_record(records) && pass_through(records, records->room, data, num_bytes) &&
           records->control(records->context, GET_TAG, TAG_BYTES, records->room + num_bytes) == 1;
}

/* Decrypt the received bytes in place; the tag is in the buffer. Return whether the record is authentic. */
static int unseal(struct records *records, void *data, int num_bytes) {
    return begin_record(records) &&
           records->control(records->context, SET_TAG, TAG_BYTES, records->room + num_bytes) == 1 &&
           pass_through(records, data, data, num_bytes);
}

package signature

import (
	"encoding/hex"
	"testing"
)

// The MAC over id.seconds.body under a key that is not base64: no style signs
// so, but the bytes that Standard Webhooks hashes are pinned here by a digest
// computed elsewhere.
func TestSignedContent(t *testing.T) {
	t.Parallel()
	body, err := hex.DecodeString("7b2262223a312e302c2261223a31323334353637383930313233343536373839303132332c2275223a225c753030653920f09f988020c3a9222c2273223a20317d0a")
	if err != nil {
		t.Fatal(err)
	}
	var w scratch
	w.standardPrefix("evt_C01", "1767225600")
	k := key{bytes: []byte("whsec_test_key_0001")}
	for range 3 { // the second and third use a prepared state
		got := hex.EncodeToString(k.appendSum(nil, w.prefix, body))
		if want := "67828aa2f56ba737f190b108aa5a408e3ceac2faaa60456d7432972f3eb3e580"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

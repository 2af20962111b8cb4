package inbox_test

import (
	"net/http"
	"testing"

	"postern/outbox/inbox"
)

func TestLocator(t *testing.T) {
	t.Parallel()
	header := http.Header{"Webhook-Id": {"msg_1"}, "X-Github-Delivery": {"guid"}, "Twice": {"a", "b"}}
	body := []byte(`{"id":"evt_1","n":12345678901234567890123,"data":{"object":{"id":"ch_1"}},"no":null,"yes":true,"list":[1]}`)
	for text, want := range map[string]string{
		"header:webhook-id":        "msg_1",
		"header:X-GitHub-Delivery": "guid",
		"json:id":                  "evt_1",
		"json:n":                   "12345678901234567890123",
		"json:data.object.id":      "ch_1",
		"header:Absent":            "",
		"header:Twice":             "",
		"json:absent":              "",
		"json:no":                  "",
		"json:yes":                 "",
		"json:list":                "",
		"json:data":                "",
		"json:id.deeper":           "",
		"json:absent.deeper":       "",
	} {
		locator, err := inbox.ParseLocator(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got, err := locator.Find(header, body); got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v, want %q", text, got, err, want)
		}
	}
	if got, err := (inbox.Locator{}).Find(header, nil); err != nil || got != "msg_1" {
		t.Errorf("the zero value finds %q, %v, want the webhook-id header", got, err)
	}
	for _, body := range []string{"", "[]", `"id"`, "{", "{}"} {
		locator, _ := inbox.ParseLocator("json:id")
		if got, err := locator.Find(nil, []byte(body)); err == nil {
			t.Errorf("%q holds the id %q", body, got)
		}
	}
	for _, text := range []string{"", "webhook-id", "header:", "header:a b", "json:", "json:a..b", "json:.a", "query:id"} {
		if _, err := inbox.ParseLocator(text); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}

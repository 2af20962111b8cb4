package post

import (
	"testing"

	"postern/integration/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// s3: the S3 server of the tests: versitygw over a folder, one bucket space, one account.
//
//	ROOT_ACCESS_KEY=… ROOT_SECRET_KEY=… s3 HOST:PORT DOMAIN FOLDER
//
// A main of our own leaves out what tests need not (other backends), which halves the build.
package main

import (
	"context"
	"log"
	"os"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

func main() {
	address, domain, folder := os.Args[1], os.Args[2], os.Args[3]
	store, err := posix.New(folder, meta.XattrMeta{}, posix.PosixOpts{Concurrency: 1000})
	if err != nil {
		log.Fatal(err)
	}
	err = embedgw.RunVersityGW(context.Background(), store, &embedgw.Config{
		RootUserAccess: os.Getenv("ROOT_ACCESS_KEY"),
		RootUserSecret: os.Getenv("ROOT_SECRET_KEY"),
		Ports:          []string{address},
		VirtualDomain:  domain,
		MaxConnections: 1000, MaxRequests: 1000, MultipartMaxParts: 10000,
		KeepAlive: true, Quiet: true,
	})
	if err != nil {
		log.Fatal(err)
	}
}

"""What mends SGLang: without it the engine works, but for requests and bugs that end stock SGLang, too."""
